"""The replay channel in the trainer: the pairs of the batch's prompts, scored, and their loss linearised.

A pairwise loss cannot be computed where verl computes losses: the two completions of a pair may be in
different micro-batches, or on different ranks. Its gradient at the policy that the step began with can: it
is a coefficient per token, in a term that is linear in the log-probabilities.

    c_t = d loss / d score * d score / d log pi(y_t),     term = sum_t c_t log pi(y_t)

The term's gradient is the preference loss's own before the first update of the step. Later updates of the
step (mini-batches, ppo_epochs) use coefficients as old as PPO's old_logprobs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import column_values
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import REPLAY as METRIC
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, score
from composer_plugins.adapters.verl_plugin.upstream import PADDING_UID
from composer_plugins.columns import AGREEING, CHOSEN, REJECTED, TOOLS, Pair, Row, pairs_of
from composer_plugins.kernels.preference import weighted
from composer_plugins.kernels.types import PairLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.metrics import means

SIDES = (CHOSEN, REJECTED)


class Replayed(NamedTuple):
    """A completion, and the coefficient of each of its tokens' log-probabilities in the loss."""

    sequence: PromptResponse
    coefficients: Tensor


def replayed_rows(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> list[Replayed]:
    """Return both sides of each pair of the batch's prompts, once for all samples of a prompt."""
    pairs = _pairs(trainer, batch)
    metrics[f"{METRIC}pairs"] = len(pairs)
    if not pairs:
        return []
    prompts = Prompts(trainer)
    rows = [
        PromptResponse(*prompts.completion(list(row["raw_prompt"]), getattr(pair, side), row))
        for side in SIDES
        for row, pair in pairs
    ]
    choice = trainer.channels.replay
    weights = torch.tensor([pair.weight for _, pair in pairs], dtype=torch.float64)
    loss, slopes = linearise(choice, _scores(trainer, rows, choice), weights)
    metrics[f"{METRIC}loss"] = float(loss.loss.mean())
    metrics |= means(loss.metrics, METRIC)
    lengths = [len(row.response) for row in rows]
    per_token = [slope / n if choice.average else slope for slope, n in zip(slopes, lengths, strict=True)]
    return [Replayed(row, c.expand(n)) for row, c, n in zip(rows, per_token, lengths, strict=True)]


def linearise(choice: Choice, scores: dict[str, Tensor], weights: Tensor) -> tuple[PairLoss, list[Tensor]]:
    """Return the weighted loss of each pair, and its mean's slope at each chosen, then rejected score."""
    leaves = {side: scores[side].detach().requires_grad_() for side in SIDES}
    loss = weighted(call(choice, scores | leaves, check=True), weights)
    slopes = torch.autograd.grad(loss.loss.mean(), list(leaves.values()))
    return PairLoss(loss.loss.detach(), loss.metrics), list(torch.cat(slopes).unbind())


def _pairs(trainer: Any, batch: KVBatchMeta) -> list[tuple[Row, Pair]]:
    optional = [name for name in (AGREEING, TOOLS) if name in trainer.columns]
    names = ["uid", "raw_prompt", *SIDES, *optional]
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    prompts: dict[str, dict[str, Any]] = {}
    for values in zip(*(column_values(data[name]) for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        if not str(row["uid"]).startswith(PADDING_UID):
            prompts.setdefault(str(row["uid"]), row)
    return [(row, pair) for row in prompts.values() for pair in pairs_of(row)]


def _scores(trainer: Any, rows: Sequence[PromptResponse], choice: Choice) -> dict[str, Tensor]:
    """Return log pi of each completion, summed or averaged, and the reference's if the loss needs it."""
    found: dict[str, Tensor] = {}
    for prefix, reference in (("", False), ("ref_", True)):
        if f"{prefix}{CHOSEN}" in choice.loss.needs:
            logprobs = [row.double() for row in score(trainer, rows, reference=reference)]
            scores = torch.stack([row.mean() if choice.average else row.sum() for row in logprobs])
            found |= {f"{prefix}{side}": half for side, half in zip(SIDES, scores.chunk(2), strict=True)}
    return found
