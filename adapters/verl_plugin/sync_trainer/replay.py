"""The replay channel in the trainer: the pairs of the batch's prompts, scored, and their loss linearised."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transfer_queue
from torch import Tensor
from transfer_queue import KVBatchMeta

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import column_values
from composer_plugins.adapters.verl_plugin.sync_trainer.linearised import linearise
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import REPLAY as METRIC
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, score
from composer_plugins.adapters.verl_plugin.upstream import PADDING_UID
from composer_plugins.columns import AGREEING, CHOSEN, REJECTED, TOOLS, Pair, Row, pairs_of
from composer_plugins.losses.inputs import OF_SIDE
from composer_plugins.losses.metrics import means

SIDES = (CHOSEN, REJECTED)


class Replayed(NamedTuple):
    """A completion, and the coefficient of each of its tokens' log-probabilities in the loss."""

    sequence: PromptResponse
    coefficients: Tensor


def replayed_rows(trainer: Any, batch: KVBatchMeta, metrics: dict[str, Any]) -> list[Replayed]:
    """Return the completions of the pairs of the batch's prompts, once for all samples of a prompt.

    The chosen ones stand before the rejected ones. A side that the loss needs no input of is left out: "sft"
    needs `chosen_nll` alone.
    """
    pairs = _pairs(trainer, batch)
    metrics[f"{METRIC}pairs"] = len(pairs)
    if not pairs:
        return []
    choice, prompts = trainer.channels.replay, Prompts(trainer)
    completions = {
        side: [
            PromptResponse(*prompts.completion(list(row["raw_prompt"]), getattr(pair, side), row))
            for row, pair in pairs
        ]
        for side, inputs_of_side in OF_SIDE.items()
        if not inputs_of_side.isdisjoint(choice.loss.needs)
    }
    weights = torch.tensor([pair.weight for _, pair in pairs], dtype=torch.float64)
    logprobs = _logprobs(trainer, completions, reference=False)
    with_reference = "ref_chosen" in choice.loss.needs
    ref_logprobs = _logprobs(trainer, completions, reference=True) if with_reference else {}
    loss, coefficients = linearise(choice, logprobs, ref_logprobs, weights)
    metrics[f"{METRIC}loss"] = float(loss.loss.mean())
    metrics |= means(loss.metrics, METRIC)
    sequences = [one for rows in completions.values() for one in rows]
    return [Replayed(*both) for both in zip(sequences, coefficients, strict=True)]


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


def _logprobs(
    trainer: Any, completions: Mapping[str, Sequence[PromptResponse]], *, reference: bool
) -> dict[str, list[Tensor]]:
    """Return log pi of each token of the completions of each side, all scored in one call."""
    found = iter(score(trainer, [one for rows in completions.values() for one in rows], reference=reference))
    return {side: [next(found) for _ in rows] for side, rows in completions.items()}
