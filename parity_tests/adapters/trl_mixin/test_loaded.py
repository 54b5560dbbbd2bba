"""What a training process of TRL loads of ours."""

from parity_tests.rigs.loaded import check_loaded


def test_a_trainer_loads_little_of_ours() -> None:
    check_loaded("adapters.trl_mixin.mixin", "trl", 12_500)
