"""Asking a model of verl's what it thinks of sequences that are in no batch: a teacher, a reference.

The sequences stand in a partition of their own of the TransferQueue for as long as that takes, and the
worker that holds the model scores them as it does verl's own: same engine, temperature and rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from composer_plugins.adapters.verl_parts.fields import (
    FROM_LOGITS,
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    nested,
    rows_of,
)

PARTITION = "composer"


class Spoken(NamedTuple):
    """Token ids of a prompt and of what was said then; both at least one."""

    prompt: Tensor
    response: Tensor


class Scores(NamedTuple):
    """Of each response, per token, in nats; the entries of `top_k` if it was asked for."""

    logprobs: list[Tensor]
    top_logprobs: list[Tensor]
    top_ids: list[Tensor]


def score(trainer: Any, sequences: Sequence[Spoken], *, reference: bool, top_k: int | None = None) -> Scores:
    """log pi(response | prompt) under the reference policy, or under the actor as it is now."""
    rows = [row(sequence) for sequence in sequences]
    rows += [rows[0]] * (-len(rows) % _multiple(trainer, reference))
    keys = [f"composer_{i}" for i in range(len(rows))]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    fields = list_of_dict_to_tensordict(rows)
    transfer_queue.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields, tags=tags)
    try:
        _ask(trainer, KVBatchMeta(keys=keys, tags=tags, partition_id=PARTITION), reference, top_k)
        wanted = ["log_probs", "response_mask", *((TOP_LOGPROBS, TOP_IDS) if top_k else ())]
        data = transfer_queue.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=wanted)
    finally:
        transfer_queue.kv_clear(keys=keys, partition_id=PARTITION)
    mask = _jagged(data["response_mask"])
    found = {
        name: rows_of(response_from_nested(_jagged(data[name]), mask))[: len(sequences)]
        for name in wanted
        if name != "response_mask"
    }
    return Scores(found["log_probs"], found.get(TOP_LOGPROBS, []), found.get(TOP_IDS, []))


def row(sequence: Spoken) -> dict[str, Tensor]:
    """What verl's engine reads of a row."""
    ids = torch.cat([sequence.prompt, sequence.response])
    mask = torch.ones_like(sequence.response)
    return {
        "prompts": sequence.prompt,
        "responses": sequence.response,
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask,
    }


def data_parallel_size(trainer: Any) -> int:
    """How many ranks share the rows; verl has asked the workers by the time that a batch is balanced."""
    return max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1


def _ask(trainer: Any, meta: KVBatchMeta, reference: bool, top_k: int | None) -> None:
    rollout = trainer.config.actor_rollout_ref.rollout
    meta.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=rollout.temperature)
    if top_k:
        meta.extra_info.update({"compute_loss": True, FROM_LOGITS: True, TOP_K: top_k})
    if not reference:
        trainer.actor_rollout_wg.compute_log_prob(meta)
    elif trainer.ref_in_actor:
        meta.extra_info["no_lora_adapter"] = True
        trainer.actor_rollout_wg.compute_log_prob(meta)
    else:
        trainer.ref_policy_wg.compute_ref_log_prob(meta)


def _multiple(trainer: Any, reference: bool) -> int:
    """Every rank gets as many rows, and cuts them into whole micro-batches."""
    config = trainer.config.actor_rollout_ref
    owner = config.ref if reference and not trainer.ref_in_actor else config.rollout
    micro = 1 if owner.log_prob_use_dynamic_bsz else owner.log_prob_micro_batch_size_per_gpu
    return data_parallel_size(trainer) * micro


def _jagged(field: Tensor) -> Tensor:
    return field if field.is_nested else nested(rows_of(field))
