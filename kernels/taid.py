"""TAID: distil from a teacher that starts beside the student and walks to the real one.

The intermediate teacher is a mixture in LOGIT space with the student's side detached, and t grows from
`t_start` to `t_end` as training goes on: at least linearly, faster while the loss still falls.

Source: arXiv 2501.16937; SakanaAI/TAID src/distil_losses/taid.py@a062892.
"""

from typing import NamedTuple

import torch

from composer_plugins.kernels.divergences import forward_kl
from composer_plugins.kernels.divergences.fused import entropy
from composer_plugins.kernels.divergences.supports import check_shapes
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.types import Logits, Mask, Metric, Scalar, TokenLoss

Number = float | Scalar


def taid(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    t: Number,
) -> TokenLoss:
    """Cross-entropy of the student against the intermediate teacher, per token, in nats.

        p_t = softmax((1 - t) sg(z_S) + t z_T),   x = -sum_v p_t,v log softmax(z_S)_v

    A cross-entropy, not a KL: at S = T it is the entropy of S, and it is this value that drives
    `step`. Metrics: `kl`, the cross-entropy less the entropy of p_t. Denominator: "token-mean".
    Departs from upstream: (1) the mixture is taken in float32 at least (upstream: in the logits'
    dtype), (2) an empty mask aggregates to 0 (upstream: NaN), (3) an entry that is -inf on one side
    only keeps probability 0 as long as that side has weight.
    """
    check_shapes(student_logits, mask, teacher_logits=teacher_logits)
    target = interpolated_logits(student_logits.detach(), teacher_logits, t)
    kl = forward_kl(student_logits, target, mask).loss
    loss = kl + entropy(target, mask, temperature=1.0)
    return TokenLoss(loss, {"kl": Metric(kl.detach(), mask)})


def interpolated_logits(start: Logits, end: Logits, weight: Number) -> Logits:
    """(1 - weight) start + weight end, in float32 at least, without gradient: a teacher between two models.

    TAID's teacher starts at the student. SDPO's trust-region teacher starts at the reference and ends at the
    student, which has a small weight. A side of weight 0 forbids nothing: 0 * -inf = 0.
    """
    sides = (at_least_float32(start).detach(), 1 - weight), (at_least_float32(end).detach(), weight)
    first, second = (_weighted(logits, share) for logits, share in sides)
    return first + second


def _weighted(logits: Logits, weight: Number) -> Logits:
    """weight * logits, with 0 * -inf = 0. NaN stays NaN."""
    w = torch.as_tensor(weight, dtype=logits.dtype, device=logits.device)
    return torch.where((w == 0) & torch.isneginf(logits), 0.0, w * logits)


class TaidState(NamedTuple):
    """Where the walk is; 0-dimensional tensors. Save it with the checkpoint."""

    t: Scalar
    momentum: Scalar
    previous_loss: Scalar


def start(
    *, t_start: float = 0.4, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> TaidState:
    """The state before the first loss: t = t_start, no momentum, no loss seen (inf). Keep it on the
    losses' device, or every step waits for the transfer.
    """
    return TaidState(
        torch.tensor(t_start, dtype=dtype, device=device),
        torch.tensor(0.0, dtype=dtype, device=device),
        torch.tensor(float("inf"), dtype=dtype, device=device),
    )


def step(
    state: TaidState,
    loss: Scalar,
    *,
    progress: Number,
    t_start: float = 0.4,
    t_end: float = 1.0,
    alpha: float = 5e-4,
    momentum: float = 0.99,
    adaptive: bool = True,
) -> TaidState:
    """The state for the next loss, given the (token-mean) loss computed with the present t.

        delta = (previous - loss) / (previous + 1e-15);   m' = momentum m + (1 - momentum) delta
        linear = t_start + (t_end - t_start) progress
        t' = min(t_end, max(linear, t + alpha sigmoid(m') (1 - t)))        or min(t_end, linear),

    the latter if not `adaptive`. `progress` is the fraction of training done. The first finite loss is
    only recorded. A pure function without host sync. Call it once per optimizer step, with the loss of the
    whole step: upstream calls it once per forward pass, so with gradient accumulation its t runs ahead.
    Departs from upstream: (1) a loss that is NaN or infinite changes neither m nor `previous` (upstream: m
    is NaN or infinite for good); t goes on, and whether to stop is the trainer's to decide.
    """
    loss = loss.detach().to(state.t)
    first = torch.isinf(state.previous_loss)
    delta = (state.previous_loss - loss) / (state.previous_loss + 1e-15)
    new_momentum = momentum * state.momentum + (1 - momentum) * delta
    # Neither at the first loss nor at one that is no number.
    new_momentum = torch.where(new_momentum.isfinite(), new_momentum, state.momentum)
    linear = t_start + (t_end - t_start) * progress
    linear = torch.as_tensor(linear, dtype=state.t.dtype, device=state.t.device)
    ahead = state.t + alpha * torch.sigmoid(new_momentum) * (1 - state.t)
    new_t = (torch.maximum(linear, ahead) if adaptive else linear).clamp(max=t_end)
    return TaidState(
        torch.where(first, state.t, new_t),
        new_momentum,
        torch.where(loss.isfinite(), loss, state.previous_loss),
    )
