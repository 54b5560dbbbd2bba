"""Several outputs of one session: grouped as verl's v1 trainer groups them for grpo, or refused."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from composer_plugins.adapters.verl_plugin.estimators import sessions_of
from composer_plugins.errors import DataError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.support import verl_cpu

if verl_cpu.missing():
    pytest.skip(f"verl's v1 trainer needs more: {verl_cpu.missing()}", allow_module_level=True)

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerSync
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from composer_plugins.adapters.verl_plugin.rules import parse_channels
from composer_plugins.adapters.verl_plugin.sync_trainer.trainer import ComposerTrainer

KEYS = ["a_0_0", "a_0_1", "a_1_0", "a_1_1", "a_1_2", "a_2_0", "b_0_1", "b_0_0", "b_1_0"]
REWARDS = [0.0, 1.0, 0.5, 0.25, 0.0, 0.5, 3.0, 7.0, 1.0]
CONFIG = {"actor_rollout_ref": {"rollout": {"n": 3}}, "trainer": {"use_v1": True}}


def data(keys: list[str] = KEYS) -> DataProto:
    """One row per key, with its reward at its last token; the last token of some rows is masked."""
    mask = torch.ones(len(keys), 3, dtype=torch.long)
    mask[1, 2] = mask[4, 0] = 0
    rewards = torch.zeros(len(keys), 3, dtype=torch.float64)
    rewards[:, 1] = torch.tensor(REWARDS[: len(keys)], dtype=torch.float64)
    tensors = {"token_level_rewards": rewards, "response_mask": mask}
    uids = np.array([key.split("_")[0] for key in keys], dtype=object)
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def advantages(name: str, keys: list[str] = KEYS, **node: Any) -> Tensor:
    """What verl's v1 trainer computes by this estimator."""
    config = OmegaConf.create(
        {"algorithm": {"adv_estimator": name, "gamma": 1.0, "composer": node}, **CONFIG}
    )
    found = compute_advantage_for_multi_trajectories(data(keys), keys, name, config=config.algorithm)
    return found.batch["advantages"]


def test_under_composer_sync_grpo_is_grouped_by_session_as_verls_own() -> None:
    theirs = advantages("grpo")
    with sessions_of(KEYS):
        ours = advantages("composer", advantage="grpo@verl")
    assert_parity(ours, theirs, terms=9, magnitude=1.0)
    assert [round(float(row.max() + row.min()), 2) for row in theirs[[0, 2, 5]]] == [2.0, -2.0, 0.0]


@pytest.mark.parametrize("name", ["rloo@verl", "opo@verl", "dr_grpo@verl", "gpg@verl", "pass_at_k@verl"])
def test_every_grouped_estimator_takes_the_final_outputs_alone(name: str) -> None:
    final = [1, 4, 5, 6, 8]
    batch = data()
    call = {"token_level_rewards": batch.batch["token_level_rewards"][final]}
    call["response_mask"] = batch.batch["response_mask"][final]
    config = OmegaConf.create({"composer": {"advantage": name}})
    alone, _ = get_adv_estimator_fn("composer")(
        index=batch.non_tensor_batch["uid"][final], config=config, **call
    )
    with sessions_of(KEYS):
        whole = advantages("composer", advantage=name)
    per_row = alone.sum(-1) / call["response_mask"].sum(-1)
    wanted = per_row[[0, 0, 1, 1, 1, 2, 3, 3, 4]].unsqueeze(-1) * batch.batch["response_mask"]
    assert torch.equal(whole, wanted.to(whole.dtype)) or torch.allclose(whole, wanted, rtol=1e-14)


def test_verl_groups_sessions_for_grpo_alone_and_ours_for_every_grouped_estimator() -> None:
    theirs = advantages("rloo")
    with sessions_of(KEYS):
        ours = advantages("composer", advantage="rloo@verl")
    assert not torch.allclose(ours, theirs.to(ours.dtype), atol=1e-3)


def test_an_estimator_of_tokens_is_computed_on_every_row_as_in_verl() -> None:
    theirs = advantages("reinforce_plus_plus")
    with sessions_of(KEYS):
        ours = advantages("composer", advantage="reinforce_pp@verl")
    assert_parity(ours, theirs * data().batch["response_mask"], terms=27, magnitude=3.0, dtype=torch.float32)


def test_the_registries_alone_refuse_more_rows_of_a_prompt_than_rollouts() -> None:
    with pytest.raises(
        DataError, match=r"prompt 'a' has 6 rows, and actor_rollout_ref.rollout.n is 3: .* set"
    ):
        advantages("composer", advantage="grpo@verl")
    with pytest.raises(DataError, match="trainer_mode=composer_sync"):
        advantages("composer/rloo")


def test_one_output_per_session_and_padding_rows_are_accepted() -> None:
    keys = ["a_0_0", "a_1_0", "a_2_0", *(f"pad_{i}_0" for i in range(5))]
    ours = advantages("composer", keys, advantage="grpo@verl")
    with sessions_of(keys):
        assert torch.equal(advantages("composer", keys, advantage="grpo@verl"), ours)


def test_composer_sync_shows_the_estimators_the_keys_of_the_batch() -> None:
    trainer: Any = object.__new__(ComposerTrainer)
    trainer.channels = parse_channels({})

    def of_verl(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics["advantages"] = advantages("composer", advantage="grpo@verl")
        return batch

    metrics: dict[str, Any] = {}
    batch = KVBatchMeta(keys=KEYS, tags=[{} for _ in KEYS], partition_id="train")
    with mock.patch.object(PPOTrainerSync, "_compute_advantage", of_verl):
        assert trainer._compute_advantage(batch, metrics) is batch
    assert_parity(metrics["advantages"], advantages("grpo"), terms=9, magnitude=1.0)
