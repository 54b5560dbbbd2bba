"""What `algorithm.composer` may hold, and a run of verl must have for it: without verl."""

from collections.abc import Mapping
from typing import Any

import pytest

from composer_plugins.adapters.verl_parts.rules import carried, channels, chosen
from composer_plugins.adapters.verl_parts.run import faults, missing_column, names
from composer_plugins.errors import ConfigError

SAMPLED = {"hint_weight": 1.0, "hint_divergence": "sampled_token"}
LIVE = SAMPLED | {"hint_teacher": "live"}
TOP_K = {"hint_weight": 1.0, "hint_divergence": "jsd", "hint_top_k": 8, "hint_teacher": "live"}
TAID = TOP_K | {"hint_divergence": "taid", "hint_params": {"t": 1.0}, "hint_t_start": 0.4}
SIMPO = {"replay_weight": 1.0, "replay_loss": "simpo"}
DPO = {"replay_weight": 1.0, "replay_loss": "dpo"}


def tree(**entries: Any) -> dict[str, Any]:
    """verl's config with these entries, `a__b=1` for a.b."""
    made: dict[str, Any] = {}
    for path, value in entries.items():
        *inner, last = path.split("__")
        at = made
        for key in inner:
            at = at.setdefault(key, {})
        at[last] = value
    return made


@pytest.mark.parametrize(
    "node", [{}, LIVE, TOP_K, TAID, SIMPO, DPO, {**LIVE, **DPO, "policy_weight": 0.5}], ids=str
)
def test_what_the_trainer_carries_parses(node: Mapping[str, Any]) -> None:
    found = channels(node)
    assert bool(found.hint) == ("hint_weight" in node) and bool(found.replay) == ("replay_weight" in node)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"hint_wieght": 1.0}, "unknown option 'hint_wieght': did you mean 'hint_weight'"),
        ({"hint_weight": 1.0}, "set hint_top_k .SDPO: 100., or hint_divergence='sampled_token'"),
        ({**SAMPLED, "hint_top_k": 4}, "'sampled_token' reads the sampled token alone"),
        ({**SAMPLED, "hint_teacher": "ema"}, "verl keeps no average of the policy's weights"),
        ({**SAMPLED, "hint_ema_rate": 0.1}, "hint_ema_rate: verl keeps no average"),
        ({**SAMPLED, "hint_estimator": "advantage", "hint_params": {"ratio_cap": 2.0}}, "computes none"),
        ({**TOP_K, "hint_params": {"top_k": 10}}, "'top_k' is 10, and the vocabulary has 9 entries"),
        ({**TOP_K, "hint_divergence": "jsd@trl"}, "jsd's temperature is 0.9: verl's logits are at"),
        ({**TOP_K, "hint_t_start": 0.1}, "hint_t_start is TAID's, and hint_divergence is 'jsd'"),
        ({**TAID, "hint_params": {"t": 0.2}}, "hint_t_start 0.4 is above t 0.2"),
        ({**TAID, "hint_t_start": 1.5}, "hint_t_start is 1.5"),
        ({"hint_teacher": "live"}, "hint_teacher without a hint_weight: set it, or remove them"),
        ({"replay_loss": "simpo"}, "replay_loss without a replay_weight"),
        ({"replay_weight": 1.0, "replay_loss": "kto"}, "needs .*, which verl does not hand over"),
        ({"replay_weight": 1.0, "replay_loss": "orpo"}, "needs chosen_nll, which verl does not hand over"),
        ({"replay_weight": 1.0, "replay_loss": "aot"}, "'aot' sorts the batch's pairs anew"),
        ({"policy_weight": 0.5}, "policy_weight 0.5, and no channel to weigh against"),
        ({"mismatch": "tis"}, "mismatch: verl corrects for the rollout engine itself"),
        ({"replay_weight": -1.0}, "replay_weight is -1.0"),
    ],
    ids=str,
)
def test_what_the_trainer_cannot_carry_is_one_error_with_its_key(
    node: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm.composer: .*{message}"):
        channels(node)


@pytest.mark.parametrize("node", [LIVE, SIMPO, {"policy_weight": 0.5}], ids=str)
def test_the_registries_alone_refuse_a_channel_that_the_trainer_carries(node: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="trainer.v1.trainer_mode=composer_sync"):
        chosen(node, "policy", None)
    with carried():
        assert chosen(node, "policy", None)[1].loss.name == "grpo"


ACTOR = "actor_rollout_ref__actor__"
LOSS = f"{ACTOR}policy_loss__"
SENT = {
    f"{LOSS}loss_mode": "composer",
    f"{LOSS}_target_": "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig",
}


@pytest.mark.parametrize(
    ("node", "entries", "key"),
    [
        (SAMPLED, {}, "actor_rollout_ref.actor.use_kl_loss"),
        (DPO, {}, "actor_rollout_ref.actor.use_kl_loss"),
        (LIVE, {"trainer__use_v1": False}, "trainer.use_v1"),
        (LIVE, {"distillation__enabled": True}, "distillation.enabled"),
        (TOP_K, {f"{ACTOR}strategy": "megatron"}, "actor_rollout_ref.actor.strategy"),
        (TOP_K, {"actor_rollout_ref__model__use_fused_kernels": True}, "use_fused_kernels"),
        (TOP_K, {f"{ACTOR}ulysses_sequence_parallel_size": 2}, "actor.ulysses_sequence_parallel_size"),
        (TOP_K, {"actor_rollout_ref__ref__ulysses_sequence_parallel_size": 2}, "ref.ulysses"),
        (TOP_K, {f"{ACTOR}fsdp_config__pad_to_length": True}, "pad_to_length"),
        (SIMPO, {f"{ACTOR}shuffle": True}, "actor_rollout_ref.actor.shuffle"),
        (LIVE | {"policy": "cispo"}, {f"{ACTOR}policy_loss__loss_mode": "composer"}, "composer.policy"),
        (LIVE | {"policy_weight": 0.5}, {f"{ACTOR}policy_loss__loss_mode": "composer/grpo"}, "policy_weight"),
        ({**SIMPO, "policy_weight": 0.0}, {}, "algorithm.composer.policy_weight"),
        (LIVE | {"policy_params": {"clip_low": 0.1}}, {}, "algorithm.composer.policy_params"),
        (LIVE | {"advantage": "rloo"}, {"algorithm__adv_estimator": "grpo"}, "algorithm.composer.advantage"),
        (LIVE | {"policy": "cispo"}, SENT | {f"{LOSS}composer": {}}, "algorithm.composer.policy"),
        (LIVE | {"policy": "cispo"}, SENT | {f"{LOSS}composer": {"policy": "grpo"}}, "composer.policy"),
        (LIVE, SENT | {f"{LOSS}composer": {}, f"{LOSS}_target_": "verl"}, "policy_loss._target_"),
        (SIMPO, {f"{LOSS}loss_mode": "geo_mean"}, "policy_loss.loss_mode"),
        (SIMPO, {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"}, "actor.loss_scale_factor"),
        (LIVE, {"trainer__v1__composer_sync__parameter_sync_step": 2}, "trainer.v1.composer_sync"),
        (
            TOP_K,
            {"actor_rollout_ref__ref__fsdp_config__pad_to_length": True},
            "ref.fsdp_config.pad_to_length",
        ),
        (TOP_K, {"actor_rollout_ref__ref__strategy": "megatron"}, "ref.strategy"),
    ],
    ids=str,
)
def test_each_option_that_a_channel_cannot_be_had_with_is_found(
    node: Mapping[str, Any], entries: dict[str, Any], key: str
) -> None:
    (found,) = faults(tree(**entries), channels(node))
    assert key in found.key and key in str(found.error())


@pytest.mark.parametrize(
    ("node", "entries"),
    [
        ({}, {"trainer__use_v1": False, "distillation__enabled": True}),
        (SAMPLED, {f"{ACTOR}use_kl_loss": True}),
        (DPO, {"algorithm__use_kl_in_reward": True}),
        (SAMPLED, {"actor_rollout_ref__model__lora_rank": 8}),
        (LIVE, {f"{ACTOR}strategy": "megatron", "actor_rollout_ref__model__use_fused_kernels": True}),
        (TOP_K, {f"{ACTOR}strategy": "fsdp2", f"{ACTOR}shuffle": True}),
        (
            {**LIVE, "policy_weight": 0.0},
            SENT | {f"{LOSS}composer": {"policy_weight": 0.0}, f"{LOSS}loss_mode": "composer/grpo"},
        ),
        (LIVE | {"policy": "cispo"}, {f"{LOSS}loss_mode": "composer/cispo"}),
        (LIVE | {"advantage": "rloo"}, {"algorithm__adv_estimator": "composer"}),
        (LIVE, SENT | {f"{LOSS}composer": {"policy": "cispo"}}),
        (
            SIMPO,
            {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor": 2048},
        ),
    ],
    ids=str,
)
def test_a_run_that_has_what_its_channels_want_has_no_fault(
    node: Mapping[str, Any], entries: dict[str, Any]
) -> None:
    assert not list(faults(tree(**entries), channels(node)))


def test_an_unknown_estimator_and_loss_are_found_with_the_nearest_name() -> None:
    config = tree(algorithm__adv_estimator="composr", **{f"{ACTOR}policy_loss__loss_mode": "composer/cipso"})
    first, second = names(config, {"gae", "composer"}, {"vanilla", "composer/cispo"})
    assert "did you mean 'composer'" in str(first) and "did you mean 'composer/cispo'" in str(second)
    assert not list(names({}, {"gae"}, {"vanilla"}))


def test_a_missing_column_is_found_with_those_there_are() -> None:
    both = channels({**LIVE, **SIMPO})
    assert missing_column("a.parquet", ["prompt", "chosen", "rejected", "privileged_context"], both) is None
    for gone in ("privileged_context", "chosen", "rejected"):
        there = {"prompt", "chosen", "rejected", "privileged_context"} - {gone}
        fault = missing_column("a.parquet", there, both)
        assert fault is not None and repr(gone) in fault.what and "a.parquet has " in fault.what
    assert missing_column("a.parquet", ["prompt"], channels({})) is None
