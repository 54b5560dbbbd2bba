"""The options of `algorithm.composer` that composer_sync delivers, and how a loss is reduced."""

import pytest

from composer_plugins.adapters.verl_plugin.options import asked_in_a_run, reduction, under_composer_sync
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import parameters_of
from composer_plugins.frameworks.registry import called
from composer_plugins.frameworks.verl import OPTIONS
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from parity_tests.cases.verl_config import OF_LOGITS


@pytest.mark.parametrize(
    ("name", "mode", "own"),
    [
        ("grpo", "token-mean", "seq-mean-token-mean"),
        ("grpo", "seq-mean-token-mean", ""),
        ("dapo", "token-mean", ""),
        ("dr_grpo", "token-mean", "seq-mean-token-sum-norm"),
        ("grpo@verl", "token-mean", ""),
        ("grpo@verl", "token-sum", ""),
        ("cispo@verl", "token-sum", ""),
        ("dr_grpo@verl", "token-mean", "seq-mean-token-sum-norm"),
        (OF_LOGITS, "token-mean", ""),
    ],
)
def test_a_reduction_that_is_not_the_losss_own_is_a_warning(name: str, mode: str, own: str) -> None:
    choice = choose("divergence" if ":" in name else "policy", name)
    found = list(reduction(choice, mode))
    assert [one.severity for one in found] == ["warning"] * bool(own)
    assert all(repr(own) in one.remedy and repr(mode) in one.problem for one in found)


def test_the_trainer_warns_of_the_reduction_and_not_the_registries_too() -> None:
    with under_composer_sync():
        asked_in_a_run({"policy": "gspo"}, "policy", None, "token-mean")  # a warning would be an error


def test_an_option_of_verls_that_sets_a_parameter_is_among_its_other_names() -> None:
    """verl's own name in `policy_params` or `advantage_params` is then answered with ours."""
    for option in OPTIONS:
        name = option.key.rpartition(".")[2]
        for loss in (one for one in losses() if one.kind == option.kind):
            for ours, conversion in parameters_of(option.sets, loss).items():
                if ours != name:
                    assert conversion.formula(name) in called(loss)[ours], (name, loss.name)


def test_every_error_of_the_table_and_of_verls_options_is_named_at_once() -> None:
    node = {"policy": "gspo", "policy_params": {"clip": 1}, "hint_weight": "x", "replay_loss": "dpoo"}
    with pytest.raises(ConfigError) as refused:
        asked_in_a_run(node, "policy", None, "token-mean", {"clip_ratio_c": 5.0, "clip_ratio": -1.0})
    keys = [line.partition(": ")[0] for line in str(refused.value).splitlines()]
    assert {key.rpartition(".")[2] for key in keys} >= {"clip_ratio_c", "clip", "hint_weight", "replay_loss"}
    with pytest.raises(ConfigError) as refused:
        asked_in_a_run({"hint_weight": 1.0, "replay_weight": 1.0}, "policy", None, "seq-mean-token-mean")
    assert len(str(refused.value).splitlines()) == 2  # neither is delivered without composer_sync


def test_composer_without_a_table_names_no_loss() -> None:
    """So the workers have none of the driver's options, where another loss than GRPO may be named."""
    with pytest.raises(ConfigError, match="nothing says which loss 'composer' is"):
        asked_in_a_run({}, "policy", None, "token-mean")
