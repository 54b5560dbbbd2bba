"""Output heads and tiles of logits: which rows and entries, the projection, and the slope back through it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import wide

# Elements of one tile of logits. On a CPU a tile should stay in the cache; a GPU wants few, large products.
CPU_TILE, GPU_TILE = 2**21, 2**27
# Of a tile with the whole vocabulary of some tokens, and of its parts, which have several temporary tensors.
CPU_PRODUCT, CPU_PART, GPU_PART = 2**22, 2**19, 2**25
BLOCK = 1024, 4096  # the most rows of another tile, on a CPU and a GPU: wide and low is slower to multiply

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


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, whose: str = "") -> None:
    """Raise ValueError unless hidden states, weight and bias belong together."""
    if hidden.shape[-1:] != weight.shape[1:] or weight.dim() != 2:
        raise ValueError(
            f"{whose}hidden {list(hidden.shape)} and {whose}weight {list(weight.shape)} do not belong "
            "together: they are [*batch, tokens, hidden] and [vocab, hidden]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{whose}bias has the shape {list(bias.shape)}, not [vocab], [{len(weight)}]")
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"{whose}hidden is {hidden.dtype} and {whose}weight {weight.dtype}; convert one, or use autocast"
        )


def check_mask(mask: Tensor) -> None:
    """Raise ValueError unless the mask is boolean."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; pass mask.bool()")


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


def tile_size(x: Tensor) -> int:
    """The number of elements that a tile on the device of `x` may have."""
    return CPU_TILE if x.device.type == "cpu" else GPU_TILE


def whole_rows(x: Tensor, vocab: int) -> tuple[int, int]:
    """The rows of a tile that holds the whole vocabulary, and those of a part for the arithmetic."""
    sizes = (CPU_PRODUCT, CPU_PART) if x.device.type == "cpu" else (GPU_TILE, GPU_PART)
    most, part = (max(1, size // vocab) for size in sizes)
    return most, part


def cuts(length: int, elements: int, across: int = 1) -> list[slice]:
    """Slices of an axis of `length`, so that one of them, times `across`, has about `elements` elements.

    None where `across` is 0.
    """
    if not across:
        return []
    size = max(1, min(length, elements // across))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def blocks(rows: int, vocab: int, x: Tensor) -> tuple[list[slice], list[slice]]:
    """How to cut the rows and the vocabulary into tiles for the device of `x`."""
    most = BLOCK[x.device.type != "cpu"]
    return cuts(rows, most), cuts(vocab, tile_size(x), min(rows, most))


def pick(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], without a copy where these are all rows."""
    return x if len(rows) == len(x) else x[rows]


def spread(x: Tensor, rows: Tensor, size: int) -> Tensor:
    """The inverse of `pick`: `size` rows, which are 0 where none was picked."""
    return x if len(rows) == size else x.new_zeros(size, *x.shape[1:]).index_copy_(0, rows, x)


def add_product(
    total: Tensor, left: Tensor, right: Tensor, *, rounded: bool = False, scale: Tensor | float = 1.0
) -> None:
    """total += scale * (left @ right): the first two are float32 at least, and `left` is rounded as `right`.

    `rounded` lets a CPU round each product to the dtype of `right` before it is added, which is faster.
    """
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif right.is_cuda:
        total.add_(torch.mm(left.to(right.dtype), right, out_dtype=total.dtype).mul_(scale))
    elif rounded:
        for part in cuts(len(total), CPU_TILE, total.shape[1]):
            total[part].add_((left[part].to(right.dtype) @ right).to(total.dtype).mul_(scale))
    else:
        total.addmm_(left, right.to(total.dtype))


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T, summed and stored in float32 at least.

    The product of two bfloat16 numbers is exact in float32. A CPU has no product of bfloat16 matrices with a
    float32 result, so the operands are converted, the weight a part at a time.
    """
    dtype = wide(hidden.dtype)
    if hidden.dtype != dtype and hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=dtype)
    if weight.dtype == dtype:
        return hidden.to(dtype) @ weight.t()
    product, hidden = hidden.new_empty(len(hidden), len(weight), dtype=dtype), hidden.to(dtype)
    for part in cuts(len(weight), CPU_TILE, weight.shape[1]):
        torch.mm(hidden, weight[part].to(dtype).t(), out=product[:, part])
    return product
