"""`ask`, whatever the framework: what is off or null, and one line to paste for options that were moved."""

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from composer_plugins.adapters.nemo_rl_loss.upstream import table_of
from composer_plugins.adapters.slime_loss.options import asked_of
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.nemo_rl import LOSS, NEMO_RL
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.frameworks.skyrl import ALGORITHM, SKYRL
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.frameworks.tinker import TINKER
from composer_plugins.frameworks.trl import TRL
from composer_plugins.frameworks.verl import VERL
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.objective.asking import ask
from composer_plugins.objective.files import of_yaml
from composer_plugins.objective.options import as_yaml
from composer_plugins.objective.own_options import asked


@pytest.mark.parametrize("framework", [NEMO_RL, SLIME], ids=lambda one: one.name)
def test_the_options_of_a_channel_with_the_weight_0_may_stay(framework: Any) -> None:
    ours = {"policy": "grpo", "replay_weight": 0, "replay_loss": "dpo", "hint_weight": 0.0}
    assert ask(framework, ours | {"hint_divergence": "jsd"})[1] == []


def test_a_ratio_to_the_rollout_engine_that_would_count_twice_is_one_error() -> None:
    args = {"rollout_temperature": 1.0, "calculate_per_token_loss": True}
    _, found = asked_of(args, {"policy": "dppo_tv", "rollout_correction": "tis"})
    assert [one.key for one in found] == ["composer.rollout_correction"]


@pytest.mark.parametrize(
    ("framework", "kind", "name", "row"),
    [
        (VERL, "policy", "vanilla", "grpo@verl"),
        (VERL, "policy", "geo_mean", "gmpo@verl"),
        (VERL, "advantage", "grpo_passk", "pass_at_k@verl"),
        (PRIME_RL, "policy", "default", "dppo_tv@prime-rl"),
        (SKYRL, "policy", "rollout_is", "masked_is@skyrl"),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_name_that_only_the_framework_has_is_answered_with_ours(
    framework: Framework, kind: Any, name: str, row: str
) -> None:
    wrong = ask(framework, {kind: name}, kind=kind)[1].errors
    assert [str(one) for one in wrong][:1] == [
        f"{kind}: {name!r} is {framework.title}'s own name; set {row}, its name here"
    ]
    assert ask(framework, {kind: row}, kind=kind)[1].errors == wrong[1:]


@pytest.mark.parametrize("name", ["dual_clip", "sequence", "gspo"])  # it sets a parameter too; no loss; ours
def test_a_name_that_does_not_stand_for_one_row_is_not_answered_with_one(name: str) -> None:
    assert all("own name" not in str(one) for one in ask(SKYRL, {"policy": name})[1])


def pulled(logprobs: Tensor, ref_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """REINFORCE with a pull to the reference."""
    return TokenLoss(torch.where(mask, (ref_logprobs - advantages) * logprobs, 0.0), {})


def test_a_hint_in_the_advantages_needs_a_policy_that_takes_them() -> None:
    hint = {"hint_weight": 0.1, "hint_estimator": "advantage"}
    assert ask(VERL, {"policy": f"{__name__}:pulled"} | hint)[1].errors == []
    (found,) = ask(PRIME_RL, {"policy": "iw_opd"} | hint)[1].errors
    assert str(found).startswith(
        "hint_estimator: 'advantage' adds the hint to the advantages, and 'iw_opd' takes none"
    )


def test_what_a_framework_does_not_have_is_said_in_the_order_of_the_options() -> None:
    ours = {"policy": "grpo", "replay_weight": 1.0, "old_policy": "rollout", "advantage": "rloo"}
    found = ask(SLIME, ours)[1]
    assert [one.key for one in found] == ["replay_weight", "old_policy", "advantage"]


@pytest.mark.parametrize("length", [0, -512, 0.5, True, float("nan"), "10", [1]])
def test_a_length_that_cannot_divide_is_an_error(length: Any) -> None:
    how: dict[str, Any] = {"modes": ("seq-mean-token-sum-norm",), "not_ours": {}, "moved": {}}
    how |= {"mode": "seq-mean-token-sum-norm", "max_length": length}
    with pytest.raises(ConfigError, match="max_length: it is "):
        asked(NEMO_RL, {LOSS: {}}, {"policy": "dr_grpo"}, **how)


@pytest.mark.parametrize("option", ["policy_params", "policy_weight", "hint_divergence"])
def test_an_option_that_is_null_is_not_set(option: str) -> None:
    found, findings = ask(SLIME, {"policy": "cispo", option: None})
    assert findings == [] and found == ask(SLIME, {"policy": "cispo"})[0]


def test_a_weight_that_the_framework_refuses_is_no_remedy() -> None:
    (error,) = ask(NEMO_RL, {"policy": "grpo", "policy_weight": 0})[1]
    assert error.remedy == "set policy_weight to a number above 0" and "other weights" not in error.problem


def test_a_key_of_ours_stands_below_our_table_whatever_it_is_called() -> None:
    args = {"rollout_temperature": 1.0}
    _, findings = asked_of(args, {"policy": "cispo", "eps_clip": 0.2, "mode": "token-sum"})
    assert [one.key for one in findings] == ["composer.eps_clip"]
    _, findings = asked_of(args, {"policy": "cispo", "mode": "token-sum"})
    assert [one.key for one in findings] == ["composer.mode"]


@pytest.mark.parametrize("value", [0, False, "", "tis"])
def test_a_value_of_an_option_that_is_not_here_is_an_error_unless_it_is_null(value: Any) -> None:
    (error,) = ask(SLIME, {"policy": "cispo", "old_policy": value})[1]
    assert error.key == "old_policy" and repr(value) in error.problem
    assert ask(SLIME, {"policy": "cispo", "old_policy": None, "hint_weight": 0})[1] == []


def test_a_whole_config_in_the_place_of_its_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match="loss_fn: it is a whole config, .* pass that table"):
        table_of({"loss_fn": {"ratio_clip_max": 0.3}})


@pytest.mark.parametrize("framework", [PRIME_RL, TINKER], ids=lambda one: one.name)
def test_a_clip_that_is_set_where_every_ratio_is_1_is_a_warning(framework: Any) -> None:
    clipped = {"policy": "grpo", "policy_params": {"clip_high": 0.28, "clip_low": 0.1}}
    (warning,) = ask(framework, clipped | {"old_policy": "current"})[1]
    assert (warning.severity, warning.key) == ("warning", "old_policy")
    assert warning.problem.endswith(
        "1 at every token: clip_high, clip_low cannot limit how far the policy moves"
    )
    for other in (clipped | {"old_policy": "rollout"}, {"policy": "grpo", "old_policy": "current"}):
        assert ask(framework, other)[1] == []


HIGH, LOW, CAP = (f"{ALGORITHM}.{name}" for name in ("eps_clip_high", "eps_clip_low", "clip_ratio_c"))
BOTH = {"clip_low": 0.1, "clip_high": 0.1}
NOT_TAKEN = "0.28", None, [0.28], -1.0
MOVED: list[tuple[Framework, str, dict[str, Any], str, dict[str, float]]] = [
    (SKYRL, "reinforce", {HIGH: 0.28}, "SkyRL reads it for its own losses, and 'reinforce' does not (", {}),
    (SKYRL, "grpo", {LOW: 0.1, CAP: 1e1}, f"({LOW}=0.1, {CAP}=10.0)", {"clip_low": 0.1, "dual_clip": 10.0}),
    (TRL, "cispo", {"epsilon_high": 5.0}, "(epsilon_high=5.0)", {"clip_high": 4.0}),  # converted
    (
        SLIME,
        "gspo",
        {"eps_clip": 0.1, "eps_clip_c": 3.0},
        "which has nothing like eps_clip_c, does not",
        BOTH,
    ),
    # A value that no loss takes is not pasted, and the others are.
    (SLIME, "ppo", {"eps_clip": 0.1, "eps_clip_high": "3"}, "eps_clip_high='3'", BOTH),
    *((SLIME, "ppo", {"eps_clip_high": x}, f"(eps_clip_high={x!r})", {}) for x in NOT_TAKEN),
]


@pytest.mark.parametrize(("framework", "policy", "moved", "problem", "params"), MOVED)
def test_moved_options_of_a_framework_are_one_error_with_a_line_to_paste(
    framework: Framework, policy: str, moved: dict[str, Any], problem: str, params: dict[str, float]
) -> None:
    error, *_ = ask(framework, {"policy": policy}, moved)[1]
    assert error.key == ", ".join(moved) and problem in error.problem
    remove = f"remove {'it' if len(moved) == 1 else 'them'}"
    assert error.remedy == (f"{remove}, and set policy_params={params}" if params else remove)


def test_a_parameter_that_the_user_has_named_stays_in_the_line() -> None:
    named = {"policy": "grpo", "policy_params": {"clip_high": 0.3, "clip_low": 0.1}}
    (error,) = ask(SKYRL, named, {HIGH: 0.28})[1]
    assert error.remedy == "remove it, and set policy_params={'clip_high': 0.3, 'clip_low': 0.1}"


@pytest.mark.parametrize("value", [3e-4, 1e-05, 0.28, 4.0, 1e16, -2.5e-7, 3, True, None, "none", [0.1, 2]])
def test_every_reader_of_yaml_takes_a_number_for_the_same(value: Any) -> None:
    text = as_yaml({"a": value})
    assert yaml.safe_load(text) == of_yaml(text) == {"a": value}
    assert type(yaml.safe_load(text)["a"]) is type(value)
