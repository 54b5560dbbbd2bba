"""Rewards at masked tokens count as in verl; several outputs of a session are grouped as for grpo."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from omegaconf import OmegaConf
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from composer_plugins.adapters.verl_plugin.options import channels_of_node, under_composer_sync
from composer_plugins.adapters.verl_plugin.sync_trainer.trainer import ComposerTrainer
from composer_plugins.errors import ComposerWarning
from composer_plugins.health.watch import Health
from composer_plugins.testing.assertions import assert_parity

KEYS = ["a_0_0", "a_0_1", "a_1_0", "a_1_1", "a_1_2", "a_2_0", "b_0_1", "b_0_0", "b_1_0"]
REWARDS = [0.0, 1.0, 0.5, 0.25, 0.0, 0.5, 3.0, 7.0, 1.0]
CONFIG = {"actor_rollout_ref": {"rollout": {"n": 3}}, "trainer": {"use_v1": True}}


def batch_of(keys: list[str], rewards: list[float], mask: Tensor, **more: Tensor) -> DataProto:
    """One row per key, with its reward at its last token."""
    at_the_end = torch.zeros(mask.shape, dtype=torch.float64)
    at_the_end[:, 2] = torch.tensor(rewards)
    tensors = {"token_level_rewards": at_the_end, "response_mask": mask, **more}
    uids = np.array([key.split("_")[0] for key in keys], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def data(keys: list[str] = KEYS) -> DataProto:
    """A row for each of these keys; the last token of row 1 is masked."""
    mask = torch.ones(len(keys), 3, dtype=torch.long)
    mask[1, 2] = mask[4, 0] = 0
    return batch_of(keys, REWARDS[: len(keys)], mask)


def advantages(name: str, keys: list[str] = KEYS, batch: DataProto | None = None, **node: Any) -> Tensor:
    """What verl's v1 trainer computes by this estimator."""
    made = OmegaConf.create({"algorithm": {"adv_estimator": name, "gamma": 1.0, "composer": node}, **CONFIG})
    batch = data(keys) if batch is None else batch.slice()
    found = compute_advantage_for_multi_trajectories(batch, keys, name, config=made.algorithm)
    return found.batch["advantages"]


@pytest.mark.parametrize("name", ["rloo@verl", "opo@verl", "dr_grpo@verl", "gpg@verl", "pass_at_k@verl"])
def test_every_grouped_estimator_takes_the_final_outputs_alone(name: str) -> None:
    final = [1, 4, 5, 6, 8]
    batch = data()
    alone = advantages("composer", [KEYS[i] for i in final], batch[final], advantage=name)
    with under_composer_sync(KEYS):
        whole = advantages("composer", advantage=name)
    mask = batch.batch["response_mask"]
    per_row = alone.sum(-1) / mask[final].sum(-1)
    wanted = per_row[[0, 0, 1, 1, 1, 2, 3, 3, 4]].unsqueeze(-1) * mask
    assert torch.equal(whole, wanted.to(whole.dtype)) or torch.allclose(whole, wanted, rtol=1e-14)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[str], DataProto]:
    """Sessions of several outputs in any order, some masked in part or wholly, and verl's padding rows."""
    counts = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=3))
    keys = [f"p{p}_{s}_{o}" for p, group in enumerate(counts) for s, n in enumerate(group) for o in range(n)]
    keys = [*draw(st.permutations(keys)), *(f"pad0_{i}_0" for i in range(draw(st.integers(0, 2))))]
    rows = st.lists(st.integers(0, 1), min_size=3, max_size=3)
    mask = torch.tensor([[0] * 3 if key.startswith("pad") else draw(rows) for key in keys])
    rewards = [0.0 if key.startswith("pad") else float(draw(st.integers(0, 2))) for key in keys]
    return keys, batch_of(keys, rewards, mask)


@pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")  # of groups of one
@settings(max_examples=60, deadline=None)
@given(drawn=sessions())
def test_grpo_equals_verls_own_on_any_sessions(drawn: tuple[list[str], DataProto]) -> None:
    keys, batch = drawn
    theirs = advantages("grpo", keys, batch)
    with under_composer_sync(keys):
        ours = advantages("composer", keys, batch, advantage="grpo@verl")
    # Of a group of one verl rounds 1 + eps to float32.
    assert_parity(ours, theirs, terms=2 * len(keys), magnitude=2.0, dtype=torch.float32)


PAIRS = {"grpo": "grpo@verl", "rloo": "rloo@verl", "opo": "opo@verl", "gpg": "gpg@verl"}
PAIRS |= {"grpo_passk": "pass_at_k@verl", "reinforce_plus_plus_baseline": "reinforce_pp_baseline@verl"}


@pytest.mark.parametrize("theirs", PAIRS)
@pytest.mark.parametrize("by_session", [False, True])
@pytest.mark.parametrize("level", ["token_k1", "seq_mean_k1"])
def test_what_verl_rejects_keeps_its_reward(theirs: str, by_session: bool, level: str) -> None:
    keys, old = [f"a_{row}_0" for row in range(3)], torch.full((3, 3), -1.0)
    sampled = old.clone()
    sampled[0, 2] = -5.0
    logprobs = {"old_log_probs": old, "rollout_log_probs": sampled}
    batch = batch_of(keys, [1.0, 0.0, 2.0], torch.ones_like(old), **logprobs)
    options = RolloutCorrectionConfig(rollout_is=None, rollout_rs=level, rollout_rs_threshold="0.5_2.0")
    batch, _ = compute_rollout_correction_and_add_to_batch(batch, options)
    assert int(batch.batch["response_mask"].sum()) == (8 if level == "token_k1" else 6)
    own = advantages(theirs, keys, batch)
    with under_composer_sync(keys) if by_session else nullcontext():
        ours = advantages("composer", keys, batch, advantage=PAIRS[theirs])
    assert own.any()
    assert_parity(ours, own, terms=8, magnitude=4.0, dtype=torch.float32)


def test_a_reward_that_an_estimator_of_tokens_leaves_out_as_verl_does_is_warned_of() -> None:
    """It is computed on every row, as in verl."""
    theirs = advantages("reinforce_plus_plus")
    message = "rewards: some are at a masked token, and 'reinforce_pp@verl' leaves these out, as in verl"
    with under_composer_sync(KEYS), pytest.warns(ComposerWarning, match=message):
        ours = advantages("composer", advantage="reinforce_pp@verl")
    assert_parity(ours, theirs, terms=27, magnitude=7.0, dtype=torch.float32)


def test_verl_groups_sessions_for_grpo_alone_and_ours_for_every_grouped_estimator() -> None:
    theirs = advantages("rloo")
    with under_composer_sync(KEYS):
        ours = advantages("composer", advantage="rloo@verl")
    assert not torch.allclose(ours, theirs.to(ours.dtype), atol=1e-3)


def test_the_registries_alone_warn_of_more_rows_of_a_prompt_than_rollouts() -> None:
    with pytest.warns(ComposerWarning, match="group_size: a group has 6 rows, and a prompt 3 .*sync"):
        advantages("composer", advantage="grpo@verl")


def test_one_output_per_session_and_padding_rows_are_accepted() -> None:
    keys = ["a_0_0", "a_1_0", "a_2_0", *(f"pad_{i}_0" for i in range(5))]
    ours = advantages("composer", keys, advantage="grpo@verl")
    with under_composer_sync(keys):
        assert torch.equal(advantages("composer", keys, advantage="grpo@verl"), ours)


@pytest.mark.filterwarnings("error:composer/health")
def test_sessions_that_are_alone_with_their_prompt_are_warned_of() -> None:
    """However many outputs they have; not where no advantage is used."""
    keys = ["a_0_0", "a_0_1", "b_0_0", "pad0_0_0", "pad0_1_0"]
    with under_composer_sync(keys):
        hint_alone = {"hint_weight": 1.0, "hint_divergence": "sampled_token", "policy_weight": 0.0}
        advantages("composer", keys, **hint_alone)
        with pytest.warns(
            ComposerWarning, match="group_of_one_frac: the 2 rollouts of this batch are 2 groups"
        ):
            advantages("composer", keys)
        advantages("composer", keys)
    with under_composer_sync(KEYS):
        advantages("composer")


def test_composer_sync_shows_the_estimators_the_keys_of_the_batch() -> None:
    trainer: Any = object.__new__(ComposerTrainer)
    trainer.channels, trainer.health = channels_of_node({}), Health(on=False)

    def of_verl(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics["advantages"] = advantages("composer", advantage="grpo@verl")
        return batch

    metrics: dict[str, Any] = {}
    batch = KVBatchMeta(keys=KEYS, tags=[{} for _ in KEYS], partition_id="train")
    with mock.patch.object(PPOTrainerSync, "_compute_advantage", of_verl):
        assert trainer._compute_advantage(batch, metrics) is batch
    assert_parity(metrics["advantages"], advantages("grpo"), terms=9, magnitude=1.0)
