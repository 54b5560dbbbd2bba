"""The replay channel in the trainer: the pairs of the batch's prompts, scored, weighed, and put beside it.

A pairwise loss cannot be computed where verl computes losses: the two completions of a pair may be in
different micro-batches, or on different ranks. What can is its gradient at the policy that the step
began with: a coefficient per token, and a term linear in the log-probabilities.

    c_t = d loss / d score * d score / d log pi(y_t),     term = sum_t c_t log pi(y_t)

Its gradient is the preference loss's own before the first update of the step. Every later one in the
step (mini-batches, ppo_epochs) uses a coefficient that is as old as PPO's old_logprobs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta

from composer_plugins.adapters.verl_parts.fields import plain
from composer_plugins.adapters.verl_plugin.policy import logged
from composer_plugins.adapters.verl_plugin.prompts import Prompts
from composer_plugins.adapters.verl_plugin.scoring import Spoken, score
from composer_plugins.catalogue import Choice
from composer_plugins.checks import check_inputs
from composer_plugins.columns import AGREEING, CHOSEN, REJECTED, Pair, pairs_of
from composer_plugins.kernels.contract import PairLoss
from composer_plugins.kernels.preference import weighted

SIDES = (CHOSEN, REJECTED)


class Replayed(NamedTuple):
    """A completion, and how much each of its tokens' log-probabilities counts in the loss."""

    spoken: Spoken
    coefficients: Tensor


def replayed(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> list[Replayed]:
    """Chosen and rejected of every pair of the batch's prompts, each once, however often it was sampled."""
    found = _pairs(trainer, batch)
    metrics["actor/composer/replay_pairs"] = len(found)
    if not found:
        return []
    made = Prompts(trainer)
    spoken = [
        Spoken(*made.completion(messages, getattr(pair, side))) for side in SIDES for messages, pair in found
    ]
    choice = trainer.channels.replay
    scores = _scores(trainer, spoken, choice)
    weights = torch.tensor([pair.weight for _, pair in found], dtype=torch.float64)
    pair, slopes = linearised(choice, scores, weights)
    metrics["actor/composer/replay_loss"] = float(pair.loss.mean())
    metrics |= logged(pair.metrics, "replay/")
    per_token = [
        slope / len(s.response) if choice.average else slope for slope, s in zip(slopes, spoken, strict=True)
    ]
    return [Replayed(s, c.expand(len(s.response))) for s, c in zip(spoken, per_token, strict=True)]


def linearised(choice: Choice, scores: dict[str, Tensor], weights: Tensor) -> tuple[PairLoss, list[Tensor]]:
    """The weighted loss of each pair, and its mean's slope at each score: the chosen's, the rejected's."""
    check_inputs(choice, scores)
    leaves = {side: scores[side].detach().requires_grad_() for side in SIDES}
    needs = ((scores | leaves)[name] for name in choice.loss.needs)
    pair = weighted(choice.loss.kernel()(*needs, **choice.params), weights)
    slopes = torch.autograd.grad(pair.loss.mean(), list(leaves.values()))
    return PairLoss(pair.loss.detach(), pair.metrics), list(torch.cat(slopes).unbind())


def _pairs(trainer: Any, batch: KVBatchMeta) -> list[tuple[list[dict[str, Any]], Pair]]:
    names = ["uid", "raw_prompt", *SIDES, *((AGREEING,) if AGREEING in trainer.columns else ())]
    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    data = transfer_queue.kv_batch_get(**where, select_fields=names)
    prompts: dict[str, dict[str, Any]] = {}
    for values in zip(*(plain(data[name]) for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        if not str(row["uid"]).startswith("pad"):  # verl fills a batch up with copies of a row
            prompts.setdefault(str(row["uid"]), row)
    return [(list(row["raw_prompt"]), pair) for row in prompts.values() for pair in pairs_of(row)]


def _scores(trainer: Any, spoken: Sequence[Spoken], choice: Choice) -> dict[str, Tensor]:
    """log pi of each completion, summed or averaged as the loss wants; of the reference if it needs it."""
    found: dict[str, Tensor] = {}
    for prefix, reference in (("", False), ("ref_", True)):
        if f"{prefix}{CHOSEN}" not in choice.loss.needs:
            continue
        rows = score(trainer, spoken, reference=reference).logprobs
        scores = torch.stack([row.double().mean() if choice.average else row.double().sum() for row in rows])
        found |= {f"{prefix}{side}": half for side, half in zip(SIDES, scores.chunk(2), strict=True)}
    return found
