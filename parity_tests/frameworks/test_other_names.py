"""A parameter by the name that another framework has for it: the error says what to set here."""

from typing import Any

import pytest

from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, SAME, Conversion, Framework, Sets
from composer_plugins.frameworks.registry import other_names, what_to_set
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss
from parity_tests.rigs.every import row_id


def refused(values: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        ComposerConfig.parse(values)
    return error.value


@pytest.mark.parametrize(
    ("policy", "name", "remedy"),
    [
        ("grpo", "clip_ratio_c", "set dual_clip, its name here"),  # difflib: ratio_cap
        ("grpo", "epsilon", "set clip_low and clip_high, its names here"),
        ("grpo@verl", "cliprange", "set clip_low and clip_high, its names here"),
        # The value differs: TRL caps the ratio at epsilon_high.
        ("cispo", "epsilon_high", "set clip_high to epsilon_high - 1"),
        ("dppo_tv", "clip_ratio_c", "set ratio_cap, its name here"),
        ("ipo", "ipo_threshold", "set tv_low and tv_high, its names here"),
        # Other losses have it, and this one has nothing like it.
        ("gspo", "clip_ratio_c", "known: clip_high, clip_low, ratio_cap"),  # difflib: ratio_cap
        ("cispo", "epsilon", "known: clip_high, clip_low, log_ratio_clamp"),  # TRL's cap, or verl's bounds
        ("grpo", "clip_hihg", "did you mean 'clip_high'?"),  # a misspelling as before
    ],
)
def test_another_frameworks_name_of_a_parameter_is_answered_with_ours(
    policy: str, name: str, remedy: str
) -> None:
    error = refused({"policy": policy, "policy_params": {name: 0.3, f"{name}_": 0.3}})
    base = policy.partition("@")[0]
    assert (error.key, error.remedy) == (f"policy_params.{name}", remedy)
    assert error.problem == f"unknown {base} parameter {name!r}"
    assert [one.key for one in error.others] == [f"policy_params.{name}_"]


def test_another_frameworks_name_of_a_parameter_of_the_hint_and_the_replay_is_answered_too() -> None:
    error = refused({"hint_weight": 1.0, "hint_params": {"distillation_topk": 100}})
    assert str(error) == (
        "hint_params.distillation_topk: unknown jsd parameter 'distillation_topk'; set top_k, its name here"
    )
    error = refused({"replay_weight": 1.0, "replay_loss": "simpo", "replay_params": {"simpo_gamma": 0.5}})
    assert error.remedy == "set gamma_beta_ratio to simpo_gamma / beta"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"clip_high": 0.28}, "it is a parameter of policy 'grpo'; set clip_high in policy_params"),
        (
            {"policy": "gspo@trl", "clip_ratio_low": 0.1},
            "'gspo'; set clip_low in policy_params, its name here",
        ),
        ({"policy": "cispo", "epsilon_high": 5.0}, "set clip_high in policy_params to epsilon_high - 1"),
        ({"policy": "reinforce", "polcy_weight": 1.0}, "option 'polcy_weight'; did you mean 'policy_weight'"),
        ({"policy": "gorp", "clip_high": 0.28}, "clip_high: unknown option 'clip_high'; known: "),
        ({"policy": 3, "clip_high": 0.28}, "policy: it is 3; set a valid string"),
    ],
)
def test_a_parameter_among_the_options_is_answered_with_its_place(values: dict[str, Any], said: str) -> None:
    error = refused(values)
    assert any(said in str(one) for one in (error, *error.others)), error


@pytest.mark.parametrize("loss", losses(), ids=row_id)
def test_the_other_names_of_a_loss_have_one_meaning_each(loss: Loss) -> None:
    for name, sets in other_names(loss).items():
        assert name not in loss.parameters and set(sets) <= set(loss.parameters)
        (theirs,) = {conversion.formula(name) for conversion in sets.values()}
        remedy = what_to_set(loss, name)
        assert remedy.count("set ") == 1 and (f" to {theirs}" in remedy) == (theirs != name)
    assert what_to_set(loss, "") == what_to_set(loss, "- 1") == what_to_set(loss, "1") == ""


NAMED = Conversion(values={True: "group", False: "none"})


@pytest.mark.parametrize(
    ("conversion", "theirs", "ours", "formula"),
    [
        (SAME, 0.28, 0.28, "x"),
        (MINUS_ONE, 1.2, 0.2, "x - 1"),
        (MINUS_ONE, 0.28, -0.72, "x - 1"),
        (ONE_MINUS, 0.8, 0.2, "1 - x"),
        (NAMED, False, "none", "'group' (for x=True) or 'none' (for x=False)"),
        (Conversion(2.0, 1.0), 3.0, 7.0, "2 * x + 1"),
    ],
)
def test_a_value_is_converted_both_ways(conversion: Conversion, theirs: Any, ours: Any, formula: str) -> None:
    assert (conversion.ours(theirs), conversion.theirs(ours)) == (ours, theirs)
    assert conversion.formula("x") == formula
    for same in (None, "text", True):
        assert conversion.values or conversion.ours(same) is conversion.theirs(same) is same
    exact = 0.1234567890123456789
    assert conversion.values or conversion.ours(exact) == conversion.factor * exact + conversion.offset


def test_a_framework_of_a_plugin_brings_its_names() -> None:
    acme = Framework(name="acme", title="Acme", names={"upper": (Sets(("clip_high",), (), MINUS_ONE),)})
    assert what_to_set(find_one("dapo").loss, "upper", among=[acme]) == "set clip_high to upper - 1"
    assert what_to_set(find_one("reinforce").loss, "upper", among=[acme]) == ""
