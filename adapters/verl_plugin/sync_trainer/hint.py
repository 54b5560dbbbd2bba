"""The hint channel in the trainer: the teacher, which sees the hint, scores each response."""

from typing import Any

import torch
import transfer_queue
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    HINT_MASK,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
    column_values,
    nested,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import HINT as METRIC
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, Scores, score
from composer_plugins.columns import HINT, hint_of


def add_teacher_logprobs(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
    """Return the batch with `HINT_MASK` and the teacher's log-probabilities, `TEACHER` or its top k.

    With hint_estimator "advantage", hint_weight (log T - log S_old) is added to the advantages instead.
    """
    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    names = ["prompts", "responses", "response_mask", "raw_prompt", HINT]
    data = transfer_queue.kv_batch_get(**where, select_fields=names)
    masks = rows_of(data["response_mask"])
    hints = [hint_of({HINT: value}) for value in column_values(data[HINT])]
    # verl fills a batch up with copies of a row whose mask is empty.
    hinted = [i for i, hint in enumerate(hints) if hint is not None and masks[i].any()]
    metrics[f"{METRIC}row_frac"] = len(hinted) / max(1, sum(bool(mask.any()) for mask in masks))
    config = trainer.channels.config
    top_k = config.hint_top_k if trainer.channels.compares_distributions else None
    scores = _score(trainer, data, hints, hinted, top_k) if hinted else Scores([], [], [])
    hint_masks = [torch.zeros_like(mask) for mask in masks]
    for i in hinted:
        hint_masks[i] = masks[i]
    fields = {HINT_MASK: nested(hint_masks)}
    if top_k:
        fields[TOP_LOGPROBS] = _placed(scores.top_logprobs, hinted, masks, torch.float32, top_k)
        fields[TOP_IDS] = _placed(scores.top_ids, hinted, masks, torch.int64, top_k)
    else:
        fields[TEACHER] = _placed(scores.logprobs, hinted, masks, torch.float32)
    if not trainer.channels.hint_is_loss:
        fields = _advantages(where, rows_of(fields[TEACHER]), hint_masks, config.hint_weight, metrics)
    return transfer_queue.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch)))


def _score(
    trainer: Any, data: TensorDict, hints: list[str | None], hinted: list[int], top_k: int | None
) -> Scores:
    prompts, responses = rows_of(data["prompts"]), rows_of(data["responses"])
    template = Prompts(trainer)
    messages = [list(one) for one in column_values(data["raw_prompt"])]
    rows = [
        PromptResponse(
            template.hinted(messages[i], hints[i], prompt=prompts[i], response=responses[i]), responses[i]
        )
        for i in hinted
    ]
    return score(trainer, rows, reference=trainer.channels.config.hint_teacher == "base", top_k=top_k)


def _placed(
    rows: list[Tensor], hinted: list[int], masks: list[Tensor], dtype: torch.dtype, *last: int
) -> Tensor:
    """Return a field [tokens, *last] of each row of the batch: `rows` at the hinted ones, zeros elsewhere."""
    found = [torch.zeros((len(mask), *last), dtype=dtype) for mask in masks]
    for i, row in zip(hinted, rows, strict=True):
        found[i] = row.to(dtype)
    return nested(found)


def _advantages(
    where: dict[str, Any], teacher: list[Tensor], masks: list[Tensor], weight: float, metrics: dict[str, Any]
) -> dict[str, Tensor]:
    data = transfer_queue.kv_batch_get(**where, select_fields=["advantages", "old_log_probs"])
    log_ratios = [
        torch.where(mask.bool(), t - old, 0.0)
        for mask, t, old in zip(masks, teacher, rows_of(data["old_log_probs"]), strict=True)
    ]
    tokens = sum(int(mask.sum()) for mask in masks)
    metrics[f"{METRIC}kl"] = -float(sum(log_ratio.sum() for log_ratio in log_ratios)) / max(1, tokens)
    advantages = rows_of(data["advantages"])
    return {"advantages": nested([a + weight * x for a, x in zip(advantages, log_ratios, strict=True)])}
