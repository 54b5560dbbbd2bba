"""Drawn rows as verl's engines hand them to a loss function, and an engine's way of calling it: no model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from benchmarks.verl_logits import gathered
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import nested
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.upstream import SHOW_LOGITS

VOCABULARY = 7


class Drawn(NamedTuple):
    """Per row: prompt and response, the logits of each position, and the fields of the batch."""

    prompts: list[Tensor]
    responses: list[Tensor]
    logits: list[Tensor]
    fields: dict[str, list[Tensor]]


def drawn(lengths: list[tuple[int, int]], seed: int = 0) -> Drawn:
    """Rows of so many prompt and response tokens, on-policy but for the last decimals."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = (
        [torch.randint(VOCABULARY, (n,), generator=g) for n in side] for side in zip(*lengths, strict=True)
    )
    logits = [torch.randn(p + r, VOCABULARY, generator=g, dtype=torch.float64) for p, r in lengths]
    logprobs = [response_logprobs(x, p, r) for x, p, r in zip(logits, prompts, responses, strict=True)]
    masks = [(torch.rand(r, generator=g) < 0.8).long() for _, r in lengths]
    fields = {
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": [
            (s + 0.1 * torch.randn(s.shape, generator=g, dtype=s.dtype)).clamp(max=0) for s in logprobs
        ],
        "advantages": [
            torch.randn(1, generator=g, dtype=torch.float64).expand(r).contiguous() for _, r in lengths
        ],
    }
    return Drawn(prompts, responses, logits, fields)


def response_logprobs(logits: Tensor, prompt: Tensor, response: Tensor) -> Tensor:
    """Log-probabilities of the response's tokens."""
    rows = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
    return gathered(rows, response)


def called(
    loss: ComposerLoss,
    rows: Drawn,
    indices: list[int],
    extra: Mapping[str, Any],
    *,
    ranks: int = 1,
    shaped: Callable[[Tensor], Tensor] = lambda packed: packed,
    logprobs_of: Callable[[Tensor, Tensor], Tensor] = gathered,
) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """The loss of the indices rows in one micro-batch of all, its gradient per row, and the metrics.

    `shaped` makes of the logits [tokens, vocabulary] those that the engine has.
    """
    logits = [rows.logits[i].clone().requires_grad_() for i in indices]
    ids = [torch.cat([rows.prompts[i], rows.responses[i]]) for i in indices]
    columns = {name: [values[i] for i in indices] for name, values in rows.fields.items()}
    columns |= {
        "prompts": [rows.prompts[i] for i in indices],
        "responses": [rows.responses[i] for i in indices],
        "input_ids": ids,
    }
    data = TensorDict({name: nested(values) for name, values in columns.items()}, batch_size=len(indices))
    tokens = int(sum(mask.sum() for mask in rows.fields["loss_mask"]))
    counts = {"dp_size": ranks, "batch_num_tokens": tokens, "global_batch_size": len(rows.prompts)}
    tensordict_utils.assign_non_tensor(data, **counts, **extra)
    packed = shaped(torch.cat(logits))
    if extra.get(SHOW_LOGITS):
        assert loss(student_logits=packed.unsqueeze(0), data=data) == {}
    following = torch.cat(ids).roll(-1)
    logprobs = logprobs_of(packed, following)
    offsets = torch.tensor([0, *(len(row) for row in ids)]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, offsets)}
    value, metrics = loss(model_output=output, data=data)
    return value.detach(), list(torch.autograd.grad(value, logits)), metrics
