"""Drawn rows as verl's engines hand them to a loss function, and an engine's way of calling it: no model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from benchmarks.verl_logits import gathered
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    HINT_MASK,
    REPLAY,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
    nested,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.upstream import SHOW_LOGITS
from parity_tests.rigs.verl_actor import composer_actor

VOCABULARY = 7
LENGTHS = [(2, 3), (1, 5), (4, 1), (3, 2), (2, 4), (1, 1), (5, 3), (2, 2)]
EVERY = list(range(len(LENGTHS)))
SAMPLED = {"hint_weight": 0.7, "hint_divergence": "sampled_token", "hint_teacher": "live"}
JSD = {"hint_weight": 0.7, "hint_divergence": "jsd", "hint_top_k": 3, "hint_teacher": "live"}
PARAMS: dict[str, Any] = {"taid": {"t": 0.5}, "sdpo": {"top_k": 4, "rest": "renormalised"}}
SIMPO = {"replay_weight": 0.3, "replay_loss": "simpo"}
EXTRA = {SHOW_LOGITS: True}


class Drawn(NamedTuple):
    """Per row: prompt and response, the logits of each position, and the fields of the batch."""

    prompts: list[Tensor]
    responses: list[Tensor]
    logits: list[Tensor]
    fields: dict[str, list[Tensor]]


def normal(g: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def drawn(lengths: list[tuple[int, int]], seed: int = 0) -> Drawn:
    """Rows of so many prompt and response tokens, on-policy but for the last decimals."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = (
        [torch.randint(VOCABULARY, (n,), generator=g) for n in side] for side in zip(*lengths, strict=True)
    )
    logits = [normal(g, p + r, VOCABULARY) for p, r in lengths]
    logprobs = logprobs_of_responses(Drawn(prompts, responses, logits, {}))
    masks = [(torch.rand(r, generator=g) < 0.8).long() for _, r in lengths]
    fields = {
        "response_mask": masks,
        "loss_mask": masks,
        "old_log_probs": [(s + 0.1 * normal(g, len(s))).clamp(max=0) for s in logprobs],
        "advantages": [normal(g, 1).expand(r).contiguous() for _, r in lengths],
    }
    return Drawn(prompts, responses, logits, fields)


def logprobs_of_responses(rows: Drawn) -> list[Tensor]:
    """Log-probabilities of the responses' tokens."""
    given = zip(rows.logits, rows.prompts, rows.responses, strict=True)
    return [gathered(x[len(p) - 1 : -1], r) for x, p, r in given]


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
    columns["prompts"] = [rows.prompts[i] for i in indices]
    columns |= {"responses": [rows.responses[i] for i in indices], "input_ids": ids}
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


def loss_of(node: dict[str, Any], mode: str = "token-mean", policy: float = 1.0) -> ComposerLoss:
    """The actor's loss with a policy term of ours, `policy` times."""
    node = {"policy_weight": policy, **node}
    return ComposerLoss(composer_actor(node, loss_agg_mode=mode, loss_scale_factor=5), node)


def with_teacher(rows: Drawn, k: int = 3) -> Drawn:
    """With a teacher's numbers of every response; the third row has no hint, the last is a replayed one."""
    g = torch.Generator().manual_seed(5)
    logprobs = [normal(g, len(r), VOCABULARY).log_softmax(-1) for r in rows.responses]
    top = [x.topk(k, -1) for x in logprobs]
    rests = [
        x.scatter(-1, t.indices, -torch.inf).logsumexp(-1, True) for x, t in zip(logprobs, top, strict=True)
    ]
    masks = [mask * (i != 2) for i, mask in enumerate(rows.fields["response_mask"])]
    zeros = torch.zeros_like(masks[-1])
    replay = [torch.zeros(len(r), dtype=torch.float64) for r in rows.responses]
    replay[-1] = normal(g, len(replay[-1]))
    fields = rows.fields | {
        HINT_MASK: [*masks[:-1], zeros],
        TEACHER: [gathered(x, r) for x, r in zip(logprobs, rows.responses, strict=True)],
        TOP_LOGPROBS: [torch.cat([t.values, rest], -1) for t, rest in zip(top, rests, strict=True)],
        TOP_IDS: [t.indices for t in top],
        REPLAY: replay,
        "response_mask": [*rows.fields["response_mask"][:-1], zeros],
        "loss_mask": [*rows.fields["loss_mask"][:-1], zeros],
    }
    return rows._replace(fields=fields)


def without_entries(rows: Drawn) -> Drawn:
    """Without the teacher's entries of the rows that have no hint, as the trainer sends them."""
    scored = [bool(mask.any()) for mask in rows.fields[HINT_MASK]]
    cut = {
        name: [row[: len(row) * one] for row, one in zip(rows.fields[name], scored, strict=True)]
        for name in (TOP_LOGPROBS, TOP_IDS)
    }
    return rows._replace(fields=rows.fields | cut)


def flat(rows: Drawn, name: str) -> Tensor:
    """A field of all rows, one after the other."""
    return torch.cat(rows.fields[name])


def response_logits(rows: Drawn) -> Tensor:
    """The logits that predict a response's tokens."""
    cut = [x[len(p) - 1 : -1] for x, p in zip(rows.logits, rows.prompts, strict=True)]
    return torch.cat(cut).requires_grad_()


def of_responses(rows: Drawn, gradients: list[Tensor]) -> Tensor:
    """Of each row's gradient what `packed` has; the rest must be 0."""
    for gradient, prompt in zip(gradients, rows.prompts, strict=True):
        assert not gradient[: len(prompt) - 1].any() and not gradient[-1].any()
    return torch.cat([g[len(p) - 1 : -1] for g, p in zip(gradients, rows.prompts, strict=True)])
