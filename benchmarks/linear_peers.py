"""The losses on hidden states that `benchmarks.linear` compares: ours, and each peer's declared settings.

Each function makes one of them, and imports its package only then: (inputs) -> the number that is
differentiated. All have gradients in the hidden states and in the weight of the (student's) head.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BETA = 0.5


class Inputs(NamedTuple):
    """Hidden states of student and teacher, their heads, and what is needed to reduce the loss."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor  # [vocab, hidden]
    teacher_hidden: Tensor
    teacher_weight: Tensor
    targets: Tensor  # [tokens]
    mask: Tensor  # [tokens]
    incoming: Tensor  # [tokens], the gradient that arrives at each log-probability


Loss = Callable[[Inputs], Tensor]


def our_log_probs() -> Loss:
    """The kernel of this repository."""
    from composer_plugins.kernels.linear import log_probs

    return lambda x: (log_probs(x.hidden, x.weight, x.targets, x.mask) * x.incoming).sum()


def our_divergence(compiled: bool) -> Loss:
    """The kernel of this repository, with a tile that torch.compile compiles, or not."""
    from composer_plugins.kernels.linear import divergence

    def loss(x: Inputs) -> Tensor:
        sides = x.hidden, x.weight, x.teacher_hidden, x.teacher_weight
        share = torch.full_like(x.incoming, 1 / len(x.mask))
        return divergence(*sides, x.mask, beta=BETA, token_weight=share, compiled=compiled).loss

    return loss


def naive_log_probs() -> Loss:
    """The logits and their log-softmax in float32 (float64 stays float64), left to autograd."""

    def loss(x: Inputs) -> Tensor:
        logits = (x.hidden @ x.weight.t()).to(torch.promote_types(x.hidden.dtype, torch.float32))
        return (torch.log_softmax(logits, -1).gather(-1, x.targets[:, None])[:, 0] * x.incoming).sum()

    return loss


def naive_divergence() -> Loss:
    """The definition on the logits in float32, left to autograd."""

    def loss(x: Inputs) -> Tensor:
        s = torch.log_softmax((x.hidden @ x.weight.t()).float(), -1)
        with torch.no_grad():
            t = torch.log_softmax((x.teacher_hidden @ x.teacher_weight.t()).float(), -1)
        m = torch.logaddexp(s + math.log(1 - BETA), t + math.log(BETA))
        values = BETA * (t.exp() * (t - m)).sum(-1) + (1 - BETA) * (s.exp() * (s - m)).sum(-1)
        return values.mean()

    return loss


def trl_log_probs(chunk: int) -> Loss:
    """TRL's fused head, without the entropy; `chunk` entries of the vocabulary at a time."""
    from trl.kernels import ChunkedLogProbFunction

    def loss(x: Inputs) -> Tensor:
        found = ChunkedLogProbFunction.apply(x.hidden, x.weight, None, x.targets, 1.0, chunk, None, 1.0, ())
        return (found[0] * x.incoming).sum()

    return loss


def trl_divergence() -> Loss:
    """TRL's chunked divergence; the size of its chunks is fixed."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(x: Inputs) -> Tensor:
        sides = x.hidden, x.weight, None, x.teacher_hidden, x.teacher_weight, None
        return ChunkedDivergenceFunction.apply(*sides, BETA)[0].mean()

    return loss


def verl_log_probs(chunk: int) -> Loss:
    """verl's fused head in torch, which computes the entropy too; `chunk` tokens at a time."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    fused = FusedLinearForPPO(chunk)
    return lambda x: (fused(x.hidden, x.weight, x.targets)[0] * x.incoming).sum()


def torch_log_probs(**options: Any) -> Loss:
    """torch's own chunked cross-entropy of a linear layer, since 2.13."""
    chosen = torch.nn.LinearCrossEntropyOptions(**options)

    def loss(x: Inputs) -> Tensor:
        nll = F.linear_cross_entropy(x.hidden, x.weight, x.targets, reduction="none", options=chosen)
        return -(nll * x.incoming).sum()

    return loss


def _liger() -> Any:
    """Liger's losses in torch. verl, if wanted, was imported before: without Triton it cannot see Liger."""
    if (where := os.environ.get("LIGER_WHEEL")) and where not in sys.path:
        sys.path.append(where)
    import liger_kernel.chunked_loss as chunked_loss

    return chunked_loss


def liger_log_probs(chunk: int) -> Loss:
    """The log-probabilities of Liger's GRPO loss; `chunk` entries of the vocabulary at a time."""
    fused = _liger().fused_linear_ppo._ChunkedSelectiveLogProbFunction
    return lambda x: (fused.apply(x.hidden, x.weight, x.targets, None, 1.0, chunk) * x.incoming).sum()


def liger_divergence(compiled: bool, chunk: int) -> Loss:
    """Liger's generalized JSD without its cross-entropy; `chunk` tokens at a time."""
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "beta": BETA}
    fused = _liger().LigerFusedLinearJSDLoss(**options, compiled=compiled, chunk_size=chunk)
    return lambda x: fused(x.hidden, x.weight, x.teacher_hidden, x.teacher_weight, x.targets)


# The first of each package is its default. verl comes before Liger: see `_liger`.
LOG_PROBS: Mapping[str, Callable[[], Loss]] = {
    "ours": our_log_probs,
    "naive": naive_log_probs,
    "verl, chunk 512": lambda: verl_log_probs(512),
    "verl, chunk 128": lambda: verl_log_probs(128),
    "TRL, chunk 32768": lambda: trl_log_probs(32768),
    "TRL, chunk 2048": lambda: trl_log_probs(2048),
    "Liger, chunk 4096": lambda: liger_log_probs(4096),
    "Liger, chunk 1024": lambda: liger_log_probs(1024),
    "torch, auto": torch_log_probs,
    "torch, accurate": lambda: torch_log_probs(acc_policy="accurate"),
}
DIVERGENCE: Mapping[str, Callable[[], Loss]] = {
    "ours, compiled tile": lambda: our_divergence(True),
    "ours, eager tile": lambda: our_divergence(False),
    "naive": naive_divergence,
    "TRL": trl_divergence,
    "Liger compiled, chunk 1024": lambda: liger_divergence(True, 1024),
    "Liger compiled, chunk 128": lambda: liger_divergence(True, 128),
    "Liger not compiled": lambda: liger_divergence(False, 1024),
}
