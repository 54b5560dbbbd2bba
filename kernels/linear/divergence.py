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

from composer_plugins.kernels.divergences.fused import kept_dtype, log_softmax, value_and_slope
from composer_plugins.kernels.linear.tiles import (
    Bias,
    Hidden,
    Weight,
    add_product,
    autocast,
    check_head,
    check_mask,
    cuts,
    head_of,
    numbers_of,
    whole_rows,
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
    check_mask(mask)
    check_head(student_hidden, student_weight, bias, "student_")
    check_head(teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    if token_weight is None:
        token_weight = torch.ones_like(mask, dtype=wide(student_hidden.dtype))
    if token_weight.shape != mask.shape:
        raise ValueError(
            f"token_weight {list(token_weight.shape)} and mask {list(mask.shape)} differ in shape"
        )
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
        keep(token_weight.detach(), mask).reshape(-1).to(wide(student_hidden.dtype)),
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
    shared = student_weight.is_set_to(teacher_weight) and student_numbers == teacher_numbers
    shared = shared and student_bias is None and teacher_bias is None
    rows = mask.nonzero().squeeze(-1)
    values = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    half = student_hidden.dtype == torch.float16
    kept = kept_dtype(student_hidden)
    by_hidden = torch.zeros_like(student_hidden if wanted[0] else student_hidden[:0], dtype=kept)
    by_weight = torch.zeros_like(student_weight if wanted[1] else student_weight[:0], dtype=dtype)
    by_bias = values.new_zeros(student_weight.shape[0] if wanted[2] else 0)
    many, few = whole_rows(mask, student_weight.shape[0])
    for some in rows.split(many):
        states, others = student_hidden[some], teacher_hidden[some]
        if shared:
            logits, their_logits = student.logits(torch.cat([states, others])).chunk(2)
        else:
            logits, their_logits = student.logits(states), teacher.logits(others)
        for part in cuts(len(some), few):
            by_logits, weight = logits[part], token_weight[some[part], None]
            weight = weight * student.slope(by_logits)
            run = tile if len(by_logits) == few else _tile  # so that one shape only is compiled
            values[some[part]], found = run(by_logits, their_logits[part], beta)
            torch.mul(found, weight, out=by_logits)
            del by_logits, found
        if wanted[2]:
            by_bias += logits.sum(0)
        # The gradient of a mean is too small for float16, and a loss scale is applied only later.
        unit = _unit(logits) if half else 1.0
        logits = logits.div_(unit) if half else logits
        if wanted[0]:
            by_hidden[some] = (logits.to(states.dtype) @ student.weight).to(kept) * unit
        if wanted[1]:
            add_product(by_weight, logits.t(), states, rounded=True, scale=unit)
        del logits, their_logits  # before the next tile is made
    return (values * token_weight).sum(), values, by_hidden, by_weight.to(kept), by_bias


def _unit(gradient: Tensor) -> Tensor:
    """The largest absolute entry; 1 if there is none but 0."""
    most = gradient.abs().max() if gradient.numel() else gradient.new_ones(())
    return torch.where(most > 0, most, 1.0)


@_divergence.register_fake
def _(
    student_hidden: Tensor, student_weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mask, wanted, dtype, kept = others[4], others[-2], wide(student_hidden.dtype), kept_dtype(student_hidden)
    return (
        student_hidden.new_empty((), dtype=dtype),
        student_hidden.new_empty(mask.shape, dtype=dtype),
        torch.empty_like(student_hidden if wanted[0] else student_hidden[:0], dtype=kept),
        torch.empty_like(student_weight if wanted[1] else student_weight[:0], dtype=kept),
        student_hidden.new_empty(student_weight.shape[0] if wanted[2] else 0, dtype=dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[2:])
    ctx.wanted = inputs[11]
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]


def _differentiate(ctx: Any, by_loss: Tensor | None, *_: None) -> Any:
    if by_loss is None:
        return (None,) * 13
    found = [
        _scaled(x, by_loss, dtype) if want else None
        for x, want, dtype in zip(ctx.saved_tensors, ctx.wanted, ctx.dtypes, strict=True)
    ]
    return (*found, *(None,) * 10)


@torch.library.custom_op("composer_plugins::linear_divergence_backward", mutates_args=())
@without_autocast
def _scaled(gradient: Tensor, by_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """The product, as an operator without a derivative: a second derivative raises."""
    return (gradient * by_loss).to(dtype)


@_scaled.register_fake
def _(gradient: Tensor, by_loss: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


_divergence.register_autograd(_differentiate, setup_context=_setup_context)
