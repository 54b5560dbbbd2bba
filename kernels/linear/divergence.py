"""Generalized JSD, forward KL and reverse KL from hidden states, with the gradient formed in the forward.

The formulas are those of `divergences.fused`, whose tile this uses. A tile holds all entries of a few tokens,
because both softmaxes and the gradient need whole rows. Four products of hidden states and heads are computed
for a student whose head is trained, and three if it is frozen. A recomputation in the backward would be six.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.divergences.fused import log_softmax, value_and_slope
from composer_plugins.kernels.linear.tiles import (
    Bias,
    Hidden,
    Weight,
    add_product,
    autocast,
    head_of,
    numbers_of,
    tile_size,
    without_autocast,
)
from composer_plugins.kernels.masking import keep, wide
from composer_plugins.kernels.types import Mask, Scalar, Tokens


class Weighted(NamedTuple):
    """A loss that was reduced with given weights, and its tokens."""

    loss: Scalar  # sum over tokens of token_weight * divergence, in nats
    per_token: Tokens  # the divergence of each token, detached; 0 where masked


def divergence(
    student_hidden: Hidden,
    student_weight: Weight,
    teacher_hidden: Float[Tensor, "*batch tokens teacher_hidden"],
    teacher_weight: Float[Tensor, "vocab teacher_hidden"],
    mask: Mask,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    token_weight: Tokens | None = None,
    bias: Bias | None = None,
    teacher_bias: Bias | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    compiled: bool = False,
) -> Weighted:
    """sum_t token_weight_t D(teacher_t, student_t), where D is that of `divergences.jsd` with this beta.

    `token_weight` holds the denominators, which must be known before (None: 1 for each token). Differentiable
    once, in the student's hidden states, weight and bias. The two models may differ in hidden size and head.
    `compiled` compiles the arithmetic of a tile with torch.compile, which takes seconds at the first call.
    Raises ValueError for shapes that do not belong together, among them two sizes of the vocabulary.
    """
    if student_weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"the student's vocabulary has {student_weight.shape[0]} entries and the teacher's "
            f"{teacher_weight.shape[0]}; a divergence compares equal vocabularies"
        )
    if not student_hidden.shape[:-1] == teacher_hidden.shape[:-1] == mask.shape:
        raise ValueError(
            f"student_hidden {list(student_hidden.shape)}, teacher_hidden {list(teacher_hidden.shape)} and "
            f"mask {list(mask.shape)} do not belong together: one entry of the mask per token"
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; the teacher's weight in the mixture lies in [0, 1]")
    student_hidden, student_weight, bias = autocast(student_hidden, student_weight, bias)
    teacher_hidden, teacher_weight, teacher_bias = autocast(teacher_hidden, teacher_weight, teacher_bias)
    if token_weight is None:
        token_weight = torch.ones_like(mask, dtype=wide(student_hidden.dtype))
    wanted = [
        torch.is_grad_enabled() and x is not None and x.requires_grad
        for x in (student_hidden, student_weight, bias)
    ]
    loss, per_token, *_ = _divergence(
        student_hidden.reshape(-1, student_hidden.shape[-1]),
        student_weight,
        bias,
        teacher_hidden.detach().reshape(-1, teacher_hidden.shape[-1]),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        mask.reshape(-1),
        keep(token_weight.detach(), mask).reshape(-1),
        numbers_of(logit_scale, softcap, temperature),
        numbers_of(teacher_logit_scale, teacher_softcap, temperature),
        beta,
        wanted,
        compiled,
    )
    return Weighted(loss, per_token.detach().view(mask.shape))


def _tile(student: Tensor, teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence of each row, and its derivative in the student's logits; overwrites both."""
    return value_and_slope(log_softmax(student), log_softmax(teacher), beta)


@cache
def _compiled_tile() -> Any:
    return torch.compile(_tile, dynamic=False)  # not at import, because it loads the compiler


@torch.library.custom_op("composer_plugins::linear_divergence", mutates_args=())
@without_autocast
def _divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    mask: Tensor,
    token_weight: Tensor,
    student_numbers: list[float],
    teacher_numbers: list[float],
    beta: float,
    wanted: list[bool],
    compiled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, each token's divergence, gradients of hidden, weight and bias or empty tensors)."""
    student = head_of(student_weight, student_bias, student_numbers)
    teacher = head_of(teacher_weight, teacher_bias, teacher_numbers)
    dtype, tile = wide(student_hidden.dtype), _compiled_tile() if compiled else _tile
    rows = mask.nonzero().squeeze(-1)
    values = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    by_hidden = torch.zeros_like(student_hidden if wanted[0] else student_hidden[:0])
    by_weight = torch.zeros_like(student_weight if wanted[1] else student_weight[:0], dtype=dtype)
    by_bias = values.new_zeros(student_weight.shape[0] if wanted[2] else 0)
    size = tile_size(mask, whole_rows=True) // student_weight.shape[0]
    for some in rows.split(max(1, size)):
        states = student_hidden[some]
        logits = student.logits(states)
        slope = student.slope(logits)
        values[some], by_logits = tile(logits, teacher.logits(teacher_hidden[some]), beta)
        by_logits.mul_(token_weight[some, None]).mul_(slope)
        if wanted[2]:
            by_bias += by_logits.sum(0)
        by_logits = by_logits.to(states.dtype)
        if wanted[0]:
            by_hidden[some] = by_logits @ student.weight
        if wanted[1]:
            add_product(by_weight, by_logits.t(), states)
    return (values * token_weight).sum(), values, by_hidden, by_weight.to(student_weight), by_bias


@_divergence.register_fake
def _(
    student_hidden: Tensor, student_weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mask, wanted, dtype = others[4], others[-2], wide(student_hidden.dtype)
    return (
        student_hidden.new_empty((), dtype=dtype),
        student_hidden.new_empty(mask.shape, dtype=dtype),
        torch.empty_like(student_hidden if wanted[0] else student_hidden[:0]),
        torch.empty_like(student_weight if wanted[1] else student_weight[:0]),
        student_hidden.new_empty(student_weight.shape[0] if wanted[2] else 0, dtype=dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.wanted = inputs[11]


def _differentiate(ctx: Any, by_loss: Tensor | None, *_: None) -> Any:
    if by_loss is None:
        return (None,) * 13
    found = [
        _scaled(x, by_loss) if want else None for x, want in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return (*found, *(None,) * 10)


@torch.library.custom_op("composer_plugins::linear_divergence_backward", mutates_args=())
@without_autocast
def _scaled(gradient: Tensor, by_loss: Tensor) -> Tensor:
    """The product, as an operator without a derivative: a second derivative raises."""
    return (gradient * by_loss).to(gradient.dtype)


@_scaled.register_fake
def _(gradient: Tensor, by_loss: Tensor) -> Tensor:
    return torch.empty_like(gradient)


_divergence.register_autograd(_differentiate, setup_context=_setup_context)
