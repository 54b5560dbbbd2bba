"""A second opinion of the channels' losses: row by row, from forward passes without padding."""

from collections import defaultdict
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from composer_plugins.kernels import preference
from composer_plugins.kernels.divergences import jsd
from parity_tests.rigs import tiny

# A preference loss for each set of inputs, as a function of the log-probabilities per token (chosen,
# rejected) of the policy, then of the reference: which inputs it takes, summed or averaged.
REPLAY: dict[str, Any] = {
    "dpo": lambda c, r, c0, r0: preference.dpo(*sums(c, r, c0, r0), beta=0.3),
    "rpo": lambda c, r, c0, r0: preference.rpo(*sums(c, r, c0, r0), -c.mean()[None], beta=0.3),
    "simpo": lambda c, r, *_: preference.simpo(*means(c, r), beta=0.3),
    "orpo": lambda c, r, *_: preference.orpo(*means(c, r), -c.mean()[None], beta=0.3),
    "cpo": lambda c, r, *_: preference.cpo(*sums(c, r), -c.mean()[None], beta=0.3),
    "sft": lambda c, *_: preference.sft(-c.mean()[None]),
}


def sums(*logprobs: Tensor) -> tuple[Tensor, ...]:
    """The score [1] of each completion of a loss on summed log-probabilities."""
    return tuple(one.sum()[None] for one in logprobs)


def means(*logprobs: Tensor) -> tuple[Tensor, ...]:
    """The score [1] of each completion of a loss on averaged log-probabilities."""
    return tuple(one.mean()[None] for one in logprobs)


def _unpadded(inputs: dict[str, Any], row: int, name: str) -> Tensor:
    ids: Tensor = inputs[f"{name}_ids"][row][inputs[f"{name}_mask"][row].bool()]
    return ids


def completion(inputs: dict[str, Any], row: int) -> Tensor:
    """The tokens of a row's completion."""
    return _unpadded(inputs, row, "completion")


def logits(model: Any, inputs: dict[str, Any], row: int, prompt: str = "prompt") -> Tensor:
    """A model's logits of a row's completion after its prompt, or after its "hint_prompt"."""
    ids = completion(inputs, row)
    both = torch.cat([_unpadded(inputs, row, prompt), ids])
    found: Tensor = model(both[None]).logits[0, -len(ids) - 1 : -1]
    return found


def logprobs(
    model: Any, inputs: dict[str, Any], row: int, prompt: str = "prompt", *, temperature: float = 1.0
) -> Tensor:
    """A model's log-probabilities of a row's completion."""
    return of_tokens(logits(model, inputs, row, prompt) / temperature, completion(inputs, row))


def of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of tokens."""
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def hint(
    made: Any,
    inputs: dict[str, Any],
    teacher: Any,
    beta: float = 0.5,
    temperature: float = 1.0,
    tokens: Tensor | None = None,
) -> Tensor:
    """The hint loss of a batch by JSD: of the rows whose teacher's prompt is another, or of these tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for i, ids in enumerate(inputs["completion_ids"]):
        with torch.no_grad():
            theirs = logits(teacher, inputs, i, "hint_prompt")
        mine = logits(made.model, inputs, i)
        hinted = not torch.equal(*(_unpadded(inputs, i, name) for name in ("prompt", "hint_prompt")))
        mask = (torch.full_like(ids, hinted) if tokens is None else tokens[i])[: len(theirs)].bool()
        if mask.any():
            loss = jsd(mine / temperature, theirs / temperature, mask, beta=beta).loss
            total = total + loss[mask].mean()
    return total / len(inputs["completion_ids"])


def replay(made: Any, base: Any, loss: str) -> tuple[Tensor, dict[str, float]]:
    """The loss of a generation batch, whose generation g takes the g-th pair, and its metrics' means."""
    metrics = defaultdict[str, list[float]](list)
    total = torch.zeros((), dtype=torch.float64)
    data, generations = tiny.rows(), made.num_generations
    for row in data:
        for g in range(generations if row["chosen"] is not None else 0):
            pick = g % len(row["chosen"])
            answers = row["chosen"][pick], row["rejected"][pick]
            temperature = made.args.replay_temperature
            mine = [_score(made.model, row["prompt"], one, temperature) for one in answers]
            with torch.no_grad():
                theirs = [_score(base, row["prompt"], one, temperature) for one in answers]
            pair = REPLAY[loss](*mine, *theirs)
            total = total + row["n_teachers_agreeing"][pick] * pair.loss[0]
            for name, metric in pair.metrics.items():
                metrics[name].append(float(metric.value[0]))
    return total / (len(data) * generations), {name: fmean(values) for name, values in metrics.items()}


def _score(model: Any, prompt: str, answer: str, temperature: float) -> Tensor:
    """Log-probabilities of answer + <eos> after prompt."""
    start, end = (
        tiny.tokenizer()(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer}<eos>")
    )
    found = model(torch.tensor([start + end])).logits[0, len(start) - 1 : -1]
    return of_tokens(found / temperature, torch.tensor(end))
