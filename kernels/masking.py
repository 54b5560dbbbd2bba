"""Masking: a masked entry contributes exactly 0, value and gradient, whatever number it holds.

Multiplying by a 0/1 mask does not do that (0 * inf is NaN, and so is its gradient), so every function
here selects with `torch.where`, and kernels mask a *log* ratio before they exponentiate it.

Only here does a policy loss look at a dtype or at `requires_grad`. While `torch.fx.symbolic_trace` runs, a
tensor has neither. So each function that looks at one becomes one node of the traced graph, or with
`traced_in_float32` the operations that it does in float32.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from composer_plugins.kernels.types import Mask, Tokens

# exp() stays this many nats below overflow, so that a saturated ratio times an advantage, summed over
# a batch, is still finite: exp(78.7) in float32, exp(699.7) in float64.
EXP_HEADROOM = 10.0
SINGLE, DOUBLE = torch.float32, torch.float64  # the dtypes of every computation
OVERFLOWS = {d: math.log(torch.finfo(d).max) for d in (SINGLE, DOUBLE, torch.bfloat16, torch.float16)}


_of_float32: list[bool] = []  # not empty while `traced_in_float32`


@contextmanager
def traced_in_float32() -> Iterator[None]:
    """Let `torch.fx.symbolic_trace` record torch's own operations only, those for float32 with a gradient.

    The graph then runs where this package is not installed, on float32 alone.
    """
    _of_float32.append(True)
    try:
        yield
    finally:
        _of_float32.pop()


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: the dtype in which numbers of `dtype` are computed."""
    return torch.promote_types(dtype, SINGLE)


def at_least_float32(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x` in float32, or in float64 where it already is: half precision is too coarse for sums."""
    if isinstance(x, Proxy):
        return x if _of_float32 else handle_torch_function(at_least_float32, (x,), x)
    return x if x.dtype in (SINGLE, DOUBLE) else x.float()


def keep(x: Float[Tensor, "..."], mask: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x` where `mask`, exactly 0 (and a gradient of exactly 0) elsewhere, NaN and inf included."""
    return torch.where(mask, x, 0.0)


def masked_sum(x: Tokens, mask: Mask, *, keepdim: bool = False) -> Float[Tensor, "..."]:
    """Sum over tokens (the last axis) where `mask`."""
    return keep(x, mask).sum(-1, keepdim=keepdim)


def masked_mean(x: Tokens, mask: Mask, *, keepdim: bool = False) -> Float[Tensor, "..."]:
    """Mean over tokens (the last axis) where `mask`; 0, still attached to the graph, for an empty row."""
    return masked_sum(x, mask, keepdim=keepdim) / mask.sum(-1, keepdim=keepdim).clamp(min=1)


def safe_exp(log_x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """exp(log_x), saturating (with gradient 0) `EXP_HEADROOM` nats below overflow; NaN stays NaN.

    An infinite ratio would meet the zero gradient of a clipped branch as 0 * inf = NaN.
    """
    return below_overflow(log_x).exp()


def below_overflow(log_x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`log_x`, at most `EXP_HEADROOM` nats below where exp() overflows."""
    if isinstance(log_x, Proxy) and not _of_float32:
        return handle_torch_function(below_overflow, (log_x,), log_x)
    dtype = SINGLE if isinstance(log_x, Proxy) else log_x.dtype
    return bounded(log_x, high=OVERFLOWS[dtype] - EXP_HEADROOM)


def bounded(
    x: Float[Tensor, "..."], low: float | None = None, high: float | None = None
) -> Float[Tensor, "..."]:
    """`x.clamp(low, high)`, but where `x` is NaN the gradient passes: torch's is 0 there, which hides it."""
    if isinstance(x, Proxy) and not _of_float32:
        return handle_torch_function(bounded, (x,), x, low, high)
    if not isinstance(x, Proxy) and not x.requires_grad:  # quicker, and there is no gradient to keep
        return x.clamp(low, high)
    x = x if high is None else torch.where(x > high, high, x)
    return x if low is None else torch.where(x < low, low, x)


def at_most(x: Float[Tensor, "..."], cap: float | None) -> Float[Tensor, "..."]:
    """`x.clamp(max=cap)`, with a gradient of 0 where it is above; `x` itself where `cap` is None."""
    return x if cap is None else x.clamp(max=cap)


def with_nan_of(x: Float[Tensor, "..."], other: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x`, but NaN where `other` is NaN or infinite; `other` gets no gradient.

    Beyond a clip, a cap or a clamp the gradient is 0, even if the advantage is NaN: a guard on the norm of
    the gradient would not see it. A NaN log ratio passes all three, and makes loss and gradient NaN.
    """
    zero = (other - other).detach()  # NaN where `other` is; torch.compile takes 0 * other for 0
    return x + zero


def with_nan_gradient(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """`x`, with a gradient of NaN where `x` is NaN: the constant slopes of x and |x| would hide it."""
    return x * torch.where(x.isnan(), torch.nan, 1.0)
