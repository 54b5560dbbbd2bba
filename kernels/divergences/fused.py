"""Forward KL, reverse KL and generalized JSD over a whole vocabulary, in one pass and little memory.

Autograd would keep some ten tensors of [tokens, vocab]. Here value and gradient are computed together, a
few rows at a time while they are in the cache, and all that is kept is the gradient in the student's logits.

With S, T = softmax(z / temperature) of student and teacher, M = beta T + (1 - beta) S, and all in nats:

    x      = beta sum_v T (log T - log M) + (1 - beta) sum_v S (log S - log M)
    dx/dS  = (1 - beta) (log S - log M)              as sum_v (dM - dM) cancels: M sums to 1
    dx/dz  = (1 - beta) S ((log S - log M) - KL(S || M)) / temperature

and at the ends, where x is a full KL by convention:

    beta = 0:  x = sum_v T (log T - log S),   dx/dz = (S - T) / temperature
    beta = 1:  x = sum_v S (log S - log T),   dx/dz = S ((log S - log T) - x) / temperature

The last step of each is the derivative of a softmax, S (dx/dS - sum_v S dx/dS).
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.divergences.supports import Pair, check_shapes
from composer_plugins.kernels.masking import keep, wide
from composer_plugins.kernels.types import Logits, Mask, Tokens

Tile = Float[Tensor, "rows tokens vocab"]

# Elements in a tile: five tiles of 2^18 float32 fit a second-level cache; a GPU wants few, large kernels.
CPU_TILE, GPU_TILE = 2**18, 2**25


def generalized_jsd(
    student_logits: Logits,
    teacher_logits: Logits,
    mask: Mask,
    *,
    beta: float,
    temperature: float,
) -> Tokens:
    """As `jsd`, `forward_kl` (beta = 0) and `reverse_kl` (beta = 1), on the whole vocabulary.

    Differentiable once, in the student; a second derivative raises. The gradient is kept in the dtype of
    the logits. For float16 it is kept in float32: a loss scale is applied only later, and until then small
    numbers would become 0.
    Raises ValueError for shapes that do not belong together.
    """
    check_shapes(student_logits, mask, teacher_logits=teacher_logits)
    return _jsd(student_logits, teacher_logits, mask, beta, temperature)


def generalized_jsd_of(pair: Pair, mask: Mask, *, beta: float) -> Tokens:
    """The same of log-probabilities on a support, whose probabilities need not sum to 1.

    dx/d(log S) = (1 - beta) S (log S - log M),   -T at beta = 0,   S (log S - log T + 1) at beta = 1
    """
    return _jsd(pair.student, pair.teacher, mask, beta, None)


def _jsd(student: Tensor, teacher: Tensor, mask: Mask, beta: float, temperature: float | None) -> Tokens:
    wanted = torch.is_grad_enabled() and student.requires_grad
    tensors = student, teacher.detach(), mask, student[..., 0]
    loss, _ = _GeneralizedJsd.apply(*tensors, beta, temperature, wanted)  # type: ignore[no-untyped-call]
    return keep(loss, mask)


def entropy(logits: Logits, mask: Mask, *, temperature: float) -> Tokens:
    """-sum_v P log P of softmax(logits / temperature), in nats and without gradient; 0 where masked."""
    check_shapes(logits, mask)
    logits, dtype = logits.detach(), wide(logits.dtype)
    value = logits.new_empty(mask.shape, dtype=dtype)
    for tile in _tiles(logits):
        log_p = log_softmax(_by_rows(logits)[tile], temperature, dtype)
        p = log_p.exp()
        value.view(_by_rows(logits).shape[:2])[tile] = -(p * log_p).masked_fill_(p == 0, 0.0).sum(-1)
    return keep(value, mask)


class _GeneralizedJsd(torch.autograd.Function):
    """(loss, gradient of each token's loss in the student's logits), the latter not differentiable.

    Without a temperature both sides are log-probabilities, and the gradient is in the student's.
    `handle` is in the student's graph but does not store its logits: a second derivative raises through it.
    """

    @staticmethod
    def forward(
        student: Tensor,
        teacher: Tensor,
        mask: Tensor,
        handle: Tensor,
        beta: float,
        temperature: float | None,
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(torch.promote_types(student.dtype, teacher.dtype))
        loss = torch.empty(mask.shape, dtype=dtype, device=student.device)
        shape = student.shape if wanted else ()
        gradient = torch.empty(shape, dtype=kept_dtype(student), device=student.device)
        students, teachers = _by_rows(student), _by_rows(teacher)
        masks, losses = mask.reshape(students.shape[:2]), loss.view(students.shape[:2])
        for tile in _tiles(student):
            if temperature is None:
                s, t = (x[tile].to(dtype, copy=True) for x in (students, teachers))
            else:
                s, t = (log_softmax(x[tile], temperature, dtype) for x in (students, teachers))
            losses[tile], slope = value_and_slope(s, t, beta, of_log_probs=temperature is None)
            if wanted:
                if temperature is not None:
                    slope.div_(temperature)
                slope.masked_fill_(~masks[tile].unsqueeze(-1), 0.0)
                gradient.view(students.shape)[tile] = slope
        return loss, gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)  # of the second output it would be a tensor of zeros
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], inputs[3])
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if by_loss is None:
            return (None,) * 7
        gradient, handle = ctx.saved_tensors
        slope = _Once.apply(gradient, by_loss.unsqueeze(-1), handle).to(ctx.dtype)  # type: ignore[no-untyped-call]
        return slope, *(None,) * 6

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
        """One more axis of the batch."""
        tensors = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(inputs[:4], in_dims, strict=False)
        ]
        wanted = inputs[-1]
        return _GeneralizedJsd.apply(*tensors, *inputs[4:]), (0, 0 if wanted else None)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    """The product of two tensors, which refuses to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, by_loss: Tensor, handle: Tensor) -> Tensor:
        return gradient * by_loss

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, ...]:
        raise RuntimeError("forward KL, reverse KL and JSD are differentiable once, not twice")


def kept_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a gradient in `x` is kept until the backward: float16 has too small a range."""
    return torch.float32 if x.dtype == torch.float16 else x.dtype


def value_and_slope(
    s: Logits, t: Logits, beta: float, *, of_log_probs: bool = False
) -> tuple[Tokens, Logits]:
    """The loss of each token and its derivative in z / temperature, or in log S; overwrites `s` and `t`.

    An entry of probability 0, whether forbidden or underflown, adds exactly 0: 0 log 0 = 0.
    """
    p_s, p_t = s.exp(), t.exp()
    if beta == 0:
        log_ratio = t.sub_(s).masked_fill_(p_t == 0, 0.0)
        value = log_ratio.mul_(p_t).sum(-1)
        return value, p_t.neg_() if of_log_probs else p_s.sub_(p_t)
    if beta == 1:
        log_ratio = s.sub_(t).masked_fill_(p_s == 0, 0.0)
        value = torch.mul(p_s, log_ratio, out=p_t).sum(-1, keepdim=True)
        return value.squeeze(-1), log_ratio.sub_(-1 if of_log_probs else value).mul_(p_s)
    least, lowest = torch.finfo(s.dtype).tiny, torch.finfo(s.dtype).min
    log_m = torch.lerp(p_s, p_t, beta).clamp_(min=least).log_()
    # A log-probability of -inf becomes a number, so that 0 times it is 0; NaN stays NaN.
    teacher = t.clamp_(min=lowest).sub_(log_m).mul_(p_t).sum(-1)
    log_ratio = s.clamp_(min=lowest).sub_(log_m)
    student = torch.mul(p_s, log_ratio, out=p_t).sum(-1, keepdim=True)
    value = beta * teacher + (1 - beta) * student.squeeze(-1)
    return value, (log_ratio if of_log_probs else log_ratio.sub_(student)).mul_(p_s.mul_(1 - beta))


def log_softmax(logits: Logits, temperature: float = 1.0, dtype: torch.dtype | None = None) -> Logits:
    """log softmax(logits / temperature), in `dtype`."""
    logits = logits if dtype is None else logits.to(dtype)
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)


def _by_rows(x: Logits) -> Tile:
    """[*batch, tokens, vocab] as [rows, tokens, vocab]: a view also where `x` is a slice of the tokens."""
    return x.reshape(math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1])


def _tiles(x: Logits) -> list[tuple[slice, slice]]:
    """Cuts of the rows and the tokens of `_by_rows(x)`, each of about as many elements as fit the cache.

    One, of everything, under torch.compile, which tiles by itself.
    """
    if torch.compiler.is_compiling():
        return [(slice(None), slice(None))]
    rows, tokens, vocab = math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1]
    size = max(1, (CPU_TILE if x.device.type == "cpu" else GPU_TILE) // max(1, vocab))
    down, along = max(1, size // max(1, tokens)), min(max(1, tokens), size)
    cuts = range(0, rows, down), range(0, tokens, along)
    return [(slice(r, r + down), slice(t, t + along)) for r in cuts[0] for t in cuts[1]]
