"""The hint channel in the trainer: what the teacher, who sees the hint, thinks of each response."""

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from composer_plugins.adapters.verl_parts.fields import (
    HINT_MASK,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
    nested,
    plain,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.prompts import Prompts
from composer_plugins.adapters.verl_plugin.scoring import Scores, Spoken, score
from composer_plugins.columns import HINT, hint_of


def teach(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
    """The batch, with the teacher's numbers beside each response: `TEACHER` or its top k, and `HINT_MASK`.

    With hint_estimator "advantage", hint_weight (log T - log S_old) is added to the advantages instead.
    """
    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    wanted = ["prompts", "responses", "response_mask", "raw_prompt", HINT]
    data = transfer_queue.kv_batch_get(**where, select_fields=wanted)
    masks = rows_of(data["response_mask"])
    hints = [hint_of({HINT: value}) for value in plain(data[HINT])]
    # verl fills a batch up with copies of a row that say nothing.
    taught = [i for i, hint in enumerate(hints) if hint is not None and masks[i].any()]
    config = trainer.channels.config
    top_k = config.hint_top_k if trainer.channels.compares_distributions else None
    lengths = [len(mask) for mask in masks]
    asked = _ask(trainer, data, hints, taught, top_k) if taught else None
    zeros = [torch.zeros_like(mask) for mask in masks]
    live = set(taught)
    taught_masks = [mask if i in live else zeros[i] for i, mask in enumerate(masks)]
    metrics["actor/composer/hint_rows"] = len(taught) / max(1, sum(bool(mask.any()) for mask in masks))
    fields = {HINT_MASK: nested(taught_masks)}
    if top_k:
        shape = [(length, top_k) for length in lengths]
        fields[TOP_LOGPROBS] = nested(_filled(asked and asked.top_logprobs, taught, shape, torch.float32))
        fields[TOP_IDS] = nested(_filled(asked and asked.top_ids, taught, shape, torch.int64))
    else:
        shapes = [(length,) for length in lengths]
        fields[TEACHER] = nested(_filled(asked and asked.logprobs, taught, shapes, torch.float32))
    if not trainer.channels.hint_is_loss:
        fields = _advantages(where, rows_of(fields[TEACHER]), taught_masks, config.hint_weight, metrics)
    return transfer_queue.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch)))


def _ask(
    trainer: Any, data: TensorDict, hints: list[str | None], taught: list[int], top_k: int | None
) -> Scores:
    prompts, responses = rows_of(data["prompts"]), rows_of(data["responses"])
    made = Prompts(trainer)
    raw = [list(messages) for messages in plain(data["raw_prompt"])]
    hinted = [
        Spoken(made.hinted(raw[i], hints[i], like=prompts[i], response=responses[i]), responses[i])
        for i in taught
    ]
    return score(trainer, hinted, reference=trainer.channels.config.hint_teacher == "base", top_k=top_k)


def _filled(
    rows: list[Tensor] | None, taught: list[int], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    """A tensor per row of the batch, of zeros where nobody was asked."""
    found = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for i, row in zip(taught, rows or [], strict=True):
        found[i] = row.to(dtype)
    return found


def _advantages(
    where: dict[str, Any], teacher: list[Tensor], masks: list[Tensor], weight: float, metrics: dict[str, Any]
) -> dict[str, Tensor]:
    data = transfer_queue.kv_batch_get(**where, select_fields=["advantages", "old_log_probs"])
    credits = [
        torch.where(mask.bool(), t - old, 0.0)
        for mask, t, old in zip(masks, teacher, rows_of(data["old_log_probs"]), strict=True)
    ]
    tokens = sum(int(mask.sum()) for mask in masks)
    metrics["actor/composer/hint/kl"] = -float(sum(credit.sum() for credit in credits)) / max(1, tokens)
    given = rows_of(data["advantages"])
    return {"advantages": nested([a + weight * c for a, c in zip(given, credits, strict=True)])}
