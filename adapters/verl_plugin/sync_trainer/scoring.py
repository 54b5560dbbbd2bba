"""Log-probabilities of our own sequences, under the actor or the reference policy.

The sequences are put into a separate partition of the TransferQueue. The worker that holds the model scores
them as it scores verl's: with the same engine, temperature and rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.padding import response_from_nested

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    nested,
    rows_of,
)

PARTITION = "composer"


class PromptResponse(NamedTuple):
    """Token ids of a prompt and of a response to it, at least one of each."""

    prompt: Tensor
    response: Tensor


class Scores(NamedTuple):
    """Log-probabilities in nats of each response's tokens; with `top_k`, the largest entries too."""

    logprobs: list[Tensor]
    top_logprobs: list[Tensor]
    top_ids: list[Tensor]


def score(
    trainer: Any, sequences: Sequence[PromptResponse], *, reference: bool, top_k: int | None = None
) -> Scores:
    """Return log pi(response | prompt) under the reference policy, or under the actor as it is now."""
    rows = [batch_row(sequence) for sequence in sequences]
    own_reference = reference and not trainer.ref_in_actor
    micro = upstream.scoring_micro_batch(trainer.config, own_reference=own_reference)
    # Every rank gets whole micro-batches.
    rows += [rows[0]] * (-len(rows) % (upstream.data_parallel_size(trainer.actor_rollout_wg) * micro))
    keys = [f"composer_{i}" for i in range(len(rows))]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    where: dict[str, Any] = {"keys": keys, "partition_id": PARTITION}
    transfer_queue.kv_batch_put(**where, fields=list_of_dict_to_tensordict(rows), tags=tags)
    try:
        _compute(trainer, KVBatchMeta(**where, tags=tags), reference, top_k)
        names = ["log_probs", *((TOP_LOGPROBS, TOP_IDS) if top_k else ())]
        data = transfer_queue.kv_batch_get(**where, select_fields=[*names, "response_mask"])
    finally:
        transfer_queue.kv_clear(**where)
    mask = _jagged(data["response_mask"])
    found = {
        name: rows_of(response_from_nested(_jagged(data[name]), mask))[: len(sequences)] for name in names
    }
    return Scores(found["log_probs"], found.get(TOP_LOGPROBS, []), found.get(TOP_IDS, []))


def batch_row(sequence: PromptResponse) -> dict[str, Tensor]:
    """Return the fields that verl's engine reads of a row."""
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


def _compute(trainer: Any, meta: KVBatchMeta, reference: bool, top_k: int | None) -> None:
    rollout = trainer.config.actor_rollout_ref.rollout
    meta.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=rollout.temperature)
    if top_k:
        meta.extra_info.update({"compute_loss": True, upstream.SHOW_LOGITS: True, TOP_K: top_k})
    if not reference:
        trainer.actor_rollout_wg.compute_log_prob(meta)
    elif trainer.ref_in_actor:
        meta.extra_info["no_lora_adapter"] = True
        trainer.actor_rollout_wg.compute_log_prob(meta)
    else:
        trainer.ref_policy_wg.compute_ref_log_prob(meta)


def _jagged(field: Tensor) -> Tensor:
    return field if field.is_nested else nested(rows_of(field))
