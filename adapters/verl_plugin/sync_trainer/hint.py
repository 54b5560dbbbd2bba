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
    TEACHER_PROMPT,
    TOP_DTYPES,
    TOP_IDS,
    TOP_LOGPROBS,
    column_values,
    nested,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import HINT as METRIC
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, compute, divisor, score
from composer_plugins.columns import HINT, hint_of
from composer_plugins.losses.masks import boolean_mask


def add_teacher_logprobs(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
    """Return the batch with `HINT_MASK`, the teacher's log-probabilities `TEACHER`, and its top k if needed.

    With hint_estimator "advantage", hint_weight (log T - log S_old) is added to the advantages instead.
    """
    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    names = ["prompts", "responses", "response_mask", "raw_prompt", HINT]
    data = transfer_queue.kv_batch_get(**where, select_fields=names)
    masks = rows_of(data["response_mask"])
    boolean_mask("response_mask", torch.cat(masks), check=True)
    hints = [hint_of({HINT: value}) for value in column_values(data[HINT])]
    # verl fills a batch up with copies of a row whose mask is empty.
    hinted = [i for i, hint in enumerate(hints) if hint is not None and masks[i].any()]
    metrics[f"{METRIC}row_frac"] = len(hinted) / max(1, sum(bool(mask.any()) for mask in masks))
    prompts = _teacher_prompts(trainer, data, hints, hinted)
    hint_masks = [mask if i in prompts else torch.zeros_like(mask) for i, mask in enumerate(masks)]
    fields = {HINT_MASK: nested(hint_masks)}
    if trainer.channels.compares_distributions:
        _write_top_k(trainer, batch, data, prompts)
    else:
        fields[TEACHER] = nested(_sampled(trainer, data, prompts))
    if not trainer.channels.hint_is_loss:
        weight = trainer.channels.config.hint_weight
        fields = _advantages(where, rows_of(fields[TEACHER]), hint_masks, weight, metrics)
    return transfer_queue.kv_batch_put(**where, fields=TensorDict(fields, batch_size=len(batch)))


def _teacher_prompts(
    trainer: Any, data: TensorDict, hints: list[str | None], hinted: list[int]
) -> dict[int, Tensor]:
    """Return the teacher's prompt of each hinted row, by the row's number."""
    prompts, responses = rows_of(data["prompts"]), rows_of(data["responses"])
    template = Prompts(trainer)
    messages = [list(one) for one in column_values(data["raw_prompt"])]
    return {
        i: template.hinted(messages[i], hints[i], prompt=prompts[i], response=responses[i]) for i in hinted
    }


def _sampled(trainer: Any, data: TensorDict, prompts: dict[int, Tensor]) -> list[Tensor]:
    """Return the teacher's log-probability of each sampled token, 0 in the rows without a hint."""
    responses = rows_of(data["responses"])
    found = [torch.zeros(len(response)) for response in responses]
    if prompts:
        rows = [PromptResponse(prompt, responses[i]) for i, prompt in prompts.items()]
        scores = score(trainer, rows, reference=trainer.channels.config.hint_teacher == "base")
        for i, row in zip(prompts, scores, strict=True):
            found[i] = row.float()
    return found


def _write_top_k(trainer: Any, batch: KVBatchMeta, data: TensorDict, prompts: dict[int, Tensor]) -> None:
    """Have the worker write the teacher's fields of the hinted rows under the keys of the batch.

    They are too large for this process: k entries for each token. verl's workers take whole micro-batches,
    so rows without a hint fill the last one. The rest get no entries.
    """
    config = trainer.channels.config
    top_k, reference = config.hint_top_k, config.hint_teacher == "base"
    others = [i for i in range(len(batch)) if i not in prompts]
    filling = -len(prompts) % divisor(trainer, reference)
    asked, rest = sorted([*prompts, *others[:filling]]), others[filling:]
    where = {"partition_id": batch.partition_id}
    if asked:
        own = rows_of(data["prompts"])
        keys = [batch.keys[i] for i in asked]
        fields = {TEACHER_PROMPT: nested([prompts.get(i, own[i]) for i in asked])}
        transfer_queue.kv_batch_put(keys=keys, fields=TensorDict(fields, batch_size=len(keys)), **where)
        tags = [batch.tags[i] for i in asked]
        meta = KVBatchMeta(keys=keys, tags=tags, fields=[TEACHER_PROMPT, "responses"], **where)
        compute(trainer, meta, reference=reference, top_k=top_k)
    if rest:
        keys, responses = [batch.keys[i] for i in rest], rows_of(data["responses"])
        fields = {TEACHER: nested([torch.zeros(len(responses[i])) for i in rest])}
        for name, width in ((TOP_LOGPROBS, top_k + 1), (TOP_IDS, top_k)):
            fields[name] = nested([torch.zeros((0, width), dtype=TOP_DTYPES[name])] * len(rest))
        transfer_queue.kv_batch_put(keys=keys, fields=TensorDict(fields, batch_size=len(keys)), **where)


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
