"""Output heads and tiles of logits: which rows and entries, the projection, and the slope back through it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import wide

# Elements of one tile of logits. On a CPU a tile should stay in the cache; a GPU wants few, large products.
CPU_TILE, GPU_TILE = 2**20, 2**27
CPU_ROWS = 2**21  # of a tile that holds the whole vocabulary of some tokens

Hidden = Float[Tensor, "*batch tokens hidden"]
Weight = Float[Tensor, "vocab hidden"]
Bias = Float[Tensor, " vocab"]

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def without_autocast(operator: Callable[Inputs, Result]) -> Callable[Inputs, Result]:
    """The operator with its own dtypes: under autocast its sums would be in half precision."""

    @wraps(operator)
    def called(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Result:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        with torch.autocast(device, enabled=False):
            return operator(*args, **kwargs)

    return called


class Head(NamedTuple):
    """What turns hidden states into logits, as plain tensors and numbers."""

    weight: Tensor  # [vocab, hidden]
    bias: Tensor | None = None  # [vocab]
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def cut(self, entries: slice) -> "Head":
        """The head of some entries of the vocabulary."""
        return self._replace(
            weight=self.weight[entries], bias=None if self.bias is None else self.bias[entries]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [rows, vocab] of `hidden` [rows, hidden], in float32 at least."""
        logits = _product(hidden, self.weight)
        if self.bias is not None:
            logits.add_(self.bias)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative of the logits in hidden @ weight.T."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        return logits.mul(self.temperature / self.softcap).square_().neg_().add_(1).mul_(slope)


def autocast(*tensors: Any) -> list[Any]:
    """The tensors in the dtype of autocast, where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def numbers_of(scale: float, softcap: float | None, temperature: float) -> list[float]:
    """The numbers of a head as an operator takes them: a softcap of 0 is none. ValueError if not positive."""
    for name, number in (("softcap", softcap), ("temperature", temperature)):
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{name} is {number}; it is a positive number")
    return [scale, softcap or 0.0, temperature]


def head_of(weight: Tensor, bias: Tensor | None, numbers: list[float]) -> Head:
    """A head from the arguments of an operator."""
    scale, softcap, temperature = numbers
    return Head(weight, bias, scale, softcap or None, temperature)


def tile_size(x: Tensor, *, whole_rows: bool = False) -> int:
    """The number of elements that a tile on the device of `x` may have."""
    return GPU_TILE if x.device.type != "cpu" else CPU_ROWS if whole_rows else CPU_TILE


def cuts(length: int, elements: int, across: int) -> list[slice]:
    """Slices of an axis of `length`, so that one of them, times `across`, has about `elements` elements.

    None where `across` is 0.
    """
    if not across:
        return []
    size = max(1, min(length, elements // across))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, for operands of one dtype and a `total` of the same or a wider one."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.add_(left @ right)


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T, summed and stored in float32 at least.

    The product of two bfloat16 numbers is exact in float32. A CPU has no product of bfloat16 matrices with a
    float32 result, so the operands are converted.
    """
    dtype = wide(hidden.dtype)
    if hidden.dtype != dtype and hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    return hidden.to(dtype) @ weight.to(dtype).t()
