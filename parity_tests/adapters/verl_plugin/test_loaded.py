"""What a training process of verl loads of ours."""

from parity_tests.rigs.loaded import check_loaded


def test_every_process_loads_little_of_ours() -> None:
    check_loaded("adapters.verl_plugin.register", "verl", 9_900)
