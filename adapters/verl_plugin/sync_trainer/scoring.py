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
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import TOP_K, nested, rows_of

PARTITION = "composer"


class PromptResponse(NamedTuple):
    """Token ids of a prompt and of a response to it, at least one of each."""

    prompt: Tensor
    response: Tensor


def score(trainer: Any, sequences: Sequence[PromptResponse], *, reference: bool) -> list[Tensor]:
    """Return log pi of each token of the responses, in nats: the reference's, or the actor's as it is now."""
    rows = [batch_row(sequence) for sequence in sequences]
    rows += [rows[0]] * (-len(rows) % divisor(trainer, reference))
    keys = [f"composer_{i}" for i in range(len(rows))]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    where: dict[str, Any] = {"keys": keys, "partition_id": PARTITION}
    transfer_queue.kv_batch_put(**where, fields=list_of_dict_to_tensordict(rows), tags=tags)
    try:
        compute(trainer, KVBatchMeta(**where, tags=tags), reference=reference)
        data = transfer_queue.kv_batch_get(**where, select_fields=["log_probs", "response_mask"])
    finally:
        transfer_queue.kv_clear(**where)
    found = response_from_nested(_jagged(data["log_probs"]), _jagged(data["response_mask"]))
    return rows_of(found)[: len(sequences)]


def divisor(trainer: Any, reference: bool) -> int:
    """Return what the number of scored rows is a multiple of: every rank gets whole micro-batches."""
    own_reference = reference and not trainer.ref_in_actor
    micro = upstream.scoring_micro_batch(trainer.config, own_reference=own_reference)
    return upstream.data_parallel_size(trainer.actor_rollout_wg) * micro


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


def compute(trainer: Any, meta: KVBatchMeta, *, reference: bool, top_k: int | None = None) -> None:
    """Have the worker of the model score these rows, and write what it returns under their keys."""
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
