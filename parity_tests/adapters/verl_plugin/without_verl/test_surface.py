"""The options of `algorithm.composer` that composer_sync delivers, and how a loss is reduced."""

from collections.abc import Mapping
from typing import Any

import pytest

from composer_plugins.adapters.verl_plugin.surface import (
    channels_delivered,
    parse_channels,
    parse_registered,
    reduction,
)
from composer_plugins.errors import ConfigError
from composer_plugins.findings import ComposerWarning
from composer_plugins.frameworks.contract import parameters_of
from composer_plugins.frameworks.registry import called
from composer_plugins.frameworks.verl import OPTIONS
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses

SAMPLED = {"hint_weight": 1.0, "hint_divergence": "sampled_token"}
LIVE = SAMPLED | {"hint_teacher": "live"}
TOP_K = {"hint_weight": 1.0, "hint_divergence": "jsd", "hint_top_k": 8, "hint_teacher": "live"}
TAID = TOP_K | {"hint_divergence": "taid", "hint_params": {"t": 1.0}, "hint_t_start": 0.4}
SIMPO = {"replay_weight": 1.0, "replay_loss": "simpo"}
DPO = {"replay_weight": 1.0, "replay_loss": "dpo"}


def of_logits(student_logits: Any, teacher_logits: Any, mask: Any, *, sharpness: float = 1.0) -> Any:
    """A divergence of the user's own."""


@pytest.mark.parametrize(
    "node",
    [
        *({}, LIVE, TOP_K, TAID, SIMPO, DPO, {**LIVE, **DPO, "policy_weight": 0.5}),
        {**TOP_K, "hint_divergence": f"{__name__}:of_logits", "hint_params": {"sharpness": 2.0}},
    ],
    ids=str,
)
def test_what_the_trainer_delivers_parses(node: Mapping[str, Any]) -> None:
    found = parse_channels(node)
    assert bool(found.hint) == ("hint_weight" in node) and bool(found.replay) == ("replay_weight" in node)
    assert found.compares_distributions == ("hint_top_k" in node)


@pytest.mark.parametrize("node", [LIVE, SIMPO, {"policy_weight": 0.5}], ids=str)
def test_the_registries_alone_refuse_a_channel_that_the_trainer_delivers(node: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="trainer.v1.trainer_mode=composer_sync"):
        parse_registered(node, "policy", None)
    with channels_delivered():
        assert parse_registered(node, "policy", None)[1].loss.name == "grpo"


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
        (f"{__name__}:of_logits", "token-mean", ""),
    ],
)
def test_a_reduction_that_is_not_the_losss_own_is_a_warning(name: str, mode: str, own: str) -> None:
    choice = choose("divergence" if ":" in name else "policy", name)
    found = list(reduction(choice, mode))
    assert [one.severity for one in found] == ["warning"] * bool(own)
    assert all(repr(own) in one.remedy and repr(mode) in one.problem for one in found)


def test_the_reduction_is_warned_of_once_by_the_registries_or_by_the_trainer() -> None:
    with pytest.warns(ComposerWarning, match="loss_agg_mode: it is 'token-mean', and 'gspo' is reduced by"):
        parse_registered({"policy": "gspo"}, "policy", None, "token-mean")
    with channels_delivered():
        parse_registered({"policy": "gspo"}, "policy", None, "token-mean")  # a warning would be an error


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
        parse_registered(node, "policy", None, "token-mean", {"clip_ratio_c": 5.0, "clip_ratio": -1.0})
    keys = [line.partition(": ")[0] for line in str(refused.value).splitlines()]
    assert {key.rpartition(".")[2] for key in keys} >= {"clip_ratio_c", "clip", "hint_weight", "replay_loss"}
    with pytest.raises(ConfigError) as refused:
        parse_registered({"hint_weight": 1.0, "replay_weight": 1.0}, "policy", None, "seq-mean-token-mean")
    assert len(str(refused.value).splitlines()) == 2  # neither is delivered without composer_sync
