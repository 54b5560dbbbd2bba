"""Options of TRL beside a policy of ours: each acts as in TRL, or is an error with a line to paste."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, upstream
from composer_plugins.adapters.trl_mixin.options import unknown_option
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_OPTIONS, TRL
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.registry import losses
from docs.generator.written import part
from parity_tests.rigs import tiny, trl_source
from parity_tests.rigs.pasted import to_paste
from parity_tests.rigs.tiny import config

# Bounds are set here that hardly anyone intends.
FAR_OFF = "ignore:policy_params.clip_:composer_plugins.errors.ComposerWarning"
pytestmark = pytest.mark.filterwarnings(FAR_OFF)

# A value of each option of TRL's own losses, away from its default.
VALUES = {
    "epsilon": 0.1,
    "epsilon_high": 0.05,
    "delta": 1.2,
    "sapo_temperature_pos": 0.7,
    "sapo_temperature_neg": 0.3,
    "vespo_k_pos": 0.7,
    "vespo_lambda_pos": 1.1,
    "vespo_k_neg": 1.5,
    "vespo_lambda_neg": 0.3,
    "importance_sampling_level": "sequence",
}
POLICIES = [loss for loss in losses() if loss.kind == "policy" and TRL.runs(loss)]
REQUIRED = {"kimi": {"ratio_low": 0.5, "ratio_high": 2.0, "tau": 0.1}, "dro": {"beta": 0.1}}
REQUIRED |= {"minirl": {"clip_low": 0.2, "clip_high": 0.2}, "opsm": {"threshold": 0.1}}
REQUIRED |= {"kimi_k15": {"tau": 0.1}, "flash_reinforce": {"delta": 0.01}, "tvpo": {"threshold": 0.1}}

# TRL's own options, and the policy of ours with the same loss.
SEQUENCE = {"importance_sampling_level": "sequence"}
TWINS: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "grpo"}, "grpo@trl"),
    ({"loss_type": "dapo"}, "dapo@trl"),
    ({"loss_type": "dr_grpo"}, "dr_grpo@trl"),
    ({"loss_type": "grpo", **SEQUENCE}, "gspo@trl"),
    ({"loss_type": "luspo", **SEQUENCE}, "luspo@trl"),
    ({"loss_type": "cispo"}, "cispo@trl"),
    ({"loss_type": "sapo"}, "sapo@trl"),
    ({"loss_type": "vespo"}, "vespo@trl"),
]


def test_a_dialect_of_another_upstream_has_that_upstreams_denominator() -> None:
    """verl divides by tokens unless loss_agg_mode is set."""
    assert config(policy="grpo@verl").resolved[2:4] == ("token-mean", "as in verl: loss_type is not set")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A path, because TRL loads the reference of its KL from one."""
    path = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(path)
    return str(path)


def off_policy_batch(made: Any) -> dict[str, torch.Tensor]:
    """A batch whose old and reference policies differ from the present one."""
    inputs = tiny.batch(made)
    torch.manual_seed(0)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in inputs:
            inputs[name] = inputs[name] + 0.7 * torch.randn_like(inputs[name])
    return inputs


def paste(ours: dict[str, Any], run: Callable[..., object] = config) -> tuple[list[str], dict[str, Any]]:
    """What the one error of these options says to remove, and the options as it says to write them."""
    removed, line = to_paste(lambda: run(**ours))
    return removed, {key: x for key, x in ours.items() if key not in removed} | eval(f"dict({line})")


def assert_acts_as_in_trl(
    theirs: dict[str, Any],
    policy: str,
    option: dict[str, Any],
    base: dict[str, Any] | None = None,
    *,
    pasted: bool = False,
) -> None:
    """The loss and gradient are TRL's with the option, and the option changes them.

    An option of TRL's own losses is `pasted`: for a policy of ours it is what the error says.
    """
    common = {"num_iterations": 2, "per_device_train_batch_size": 8, "steps_per_generation": 2}
    common |= {"gradient_accumulation_steps": 2, **(base or {})}
    own = tiny.trainer(**common | theirs | option)
    ours = common | option | {"policy": policy}
    mine = tiny.trainer(**(paste(ours, tiny.trainer)[1] if pasted else ours))
    inputs = off_policy_batch(own)
    tiny.batch(mine)
    expected, wanted = tiny.loss_and_gradient(own, inputs)
    loss, gradient = tiny.loss_and_gradient(mine, inputs)
    without = tiny.trainer(**common | theirs)
    _, other = tiny.loss_and_gradient(without, off_policy_batch(without))
    assert tiny.relative_difference(wanted, other) > 1e-4, "the option changed nothing"
    assert float(abs(loss - expected)) <= tiny.FLOAT32 * max(1.0, float(abs(expected)))
    assert tiny.relative_difference(wanted, gradient) <= tiny.FLOAT32


def test_every_option_that_trl_reads_for_the_loss_is_classified() -> None:
    """Read from TRL's source: an option that a new TRL adds or drops fails here."""
    assert trl_source.options_read() == set(LOSS_OPTIONS)
    assert {name: upstream.DEFAULTS[name] for name in LOSS_OPTIONS} == {
        name: option.default for name, option in LOSS_OPTIONS.items()
    }
    assert {name for name, option in LOSS_OPTIONS.items() if option.acts_by_parameters} == set(VALUES)
    for name, option in LOSS_OPTIONS.items():
        for row in option.sets:
            known = {loss.name: loss for loss in POLICIES}
            assert all(set(row.parameters) <= set(known[loss].parameters) for loss in row.losses), name


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hint_wieght", "did you mean 'hint_weight'?"),
        ("loss_typ", "did you mean 'loss_type'?"),
        ("replay_wieght", "did you mean 'replay_weight'?"),
        ("entropy_weight", "known: "),
        ("der_loss_weight1", "known: "),
    ],
)
def test_a_suggestion_never_changes_what_is_trained(name: str, remedy: str) -> None:
    known = {one.name for one in fields(ComposerGRPOConfig)}
    wanted = f"{name}: unknown option {name!r}; {remedy}"
    assert str(unknown_option(name, known, {"policy": "trl"})).startswith(wanted)


def test_trls_name_of_dpos_loss_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="'sigmoid' is not a loss of its own; .* set 'dpo'"):
        tiny.config(replay_weight=1.0, replay_loss="sigmoid")


def test_a_dialects_lower_bound_above_the_pasted_upper_one_is_taken_away() -> None:
    _, pasted = paste({"policy": "cispo@verl", "epsilon_high": 0.28})
    assert config(**pasted).resolved.policy.params["clip_low"] == 1.0  # a lower bound of 0, as in TRL


@pytest.mark.parametrize("loss", POLICIES, ids=lambda loss: loss.name)
def test_trls_own_loss_options_never_reach_a_loss_of_ours(loss: Any) -> None:
    """All that are moved are one error, and its line has those that the loss has a parameter for."""
    params = REQUIRED.get(loss.name, {})
    ours = {"policy": loss.name, "policy_params": params}
    for name, value in VALUES.items():
        removed, pasted = paste(ours | {name: value})
        assert removed == [name]
        assert config(**pasted).resolved.policy.params == {**LOSS_OPTIONS[name].values(loss, value), **params}
    removed, pasted = paste(ours | VALUES)
    assert set(removed) == set(VALUES)
    assert pasted["policy_params"] == {**TRL.parameters(loss, VALUES), **params}


@pytest.mark.parametrize("name", VALUES)
def test_an_option_at_trls_default_counts_as_not_set(name: str) -> None:
    default = upstream.DEFAULTS[name]
    for policy in ("gspo", "reinforce"):  # TRL's epsilon is 0.2, and GSPO's paper clips at 3e-4
        assert config(policy=policy, **{name: default}).resolved.policy.params == {}


@pytest.mark.parametrize(
    ("theirs", "policy", "name"),
    [
        (theirs, policy, name)
        for theirs, policy in TWINS
        for name, value in VALUES.items()
        if LOSS_OPTIONS[name].values(find_one(policy, "policy").loss, value)
    ],
)
def test_a_pasted_line_trains_what_trls_option_does(theirs: dict[str, Any], policy: str, name: str) -> None:
    assert_acts_as_in_trl(theirs, policy, {name: VALUES[name]}, pasted=True)


@pytest.mark.parametrize(
    ("option", "base"),
    [
        ({"beta": 0.3}, {}),
        ({"use_bias_correction_kl": False}, {"beta": 0.3}),
        ({"entropy_coef": 0.1}, {}),
        ({"off_policy_mask_threshold": 0.02}, {}),
        ({"top_entropy_quantile": 0.5}, {}),
        ({"temperature": 0.6}, {}),
        ({"scale_rewards": "none"}, {}),
        ({"scale_rewards": "batch"}, {}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {}),
        ({"reward_weights": [3.0]}, {"scale_rewards": "none"}),
        ({"mask_truncated_completions": True}, {}),
        ({"num_generations": 2}, {"per_device_train_batch_size": 4}),
        ({"steps_per_generation": 1}, {}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) or "-",
)
@pytest.mark.parametrize(("theirs", "policy"), [TWINS[1], TWINS[3]], ids=["dapo", "gspo"])
def test_an_option_of_the_rest_of_the_loss_acts_as_in_trl(
    theirs: dict[str, Any], policy: str, option: dict[str, Any], base: dict[str, Any], saved_model: str
) -> None:
    assert_acts_as_in_trl(theirs, policy, option, {"policy_model": saved_model, **base})


def test_the_length_of_dr_grpos_denominator_is_trls() -> None:
    assert_acts_as_in_trl(*TWINS[2], {"max_completion_length": 6})


@pytest.mark.parametrize(("target", "end"), [(9.0, 0.25), (2.0, 0.05)], ids=["rises", "sinks"])
def test_the_adaptive_entropy_bonus_is_trls(target: float, end: float) -> None:
    """Its coefficient moves from 0.1 after each of four steps, by 0.05 or to a bound."""
    adaptive = {"max_steps": 4, "learning_rate": 1e-3, "use_adaptive_entropy": True, "entropy_coef": 0.1}
    adaptive |= {"entropy_target": target, "entropy_coef_delta": 0.05}
    adaptive |= {"entropy_coef_min": 0.05, "entropy_coef_max": 0.25}
    theirs = tiny.trainer(**adaptive, loss_type="grpo")
    mine = tiny.trainer(**adaptive, policy="grpo@trl")
    expected, found = tiny.gradients(theirs), tiny.gradients(mine)
    assert max(map(tiny.relative_difference, expected, found)) <= tiny.FLOAT32
    assert theirs.entropy_coef == mine.entropy_coef == pytest.approx(end)


def test_the_page_has_every_option_that_trl_does_not_have() -> None:
    options = part("docs/trl_options.md", "options")
    options.check()
    assert all(f"| `{one.name}` |" in options.made() for one in fields(ComposerGRPOConfig)[-20:])
