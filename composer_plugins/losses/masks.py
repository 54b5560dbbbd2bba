"""A framework's mask as a mask of booleans, which kernels take."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.errors import DataError


def boolean_mask(key: str, mask: Any, *, check: bool) -> Tensor:
    """Return the mask as booleans; DataError at `key` if it holds another number than 0 and 1.

    The numbers are looked at with `check`, which waits for the device: an adapter does so on its first batch.
    """
    found = _tensor(key, mask)
    if found.dtype is torch.bool:
        return found
    if check and bool((wrong := (found != 0) & (found != 1)).any()):
        problem = f"it holds {float(found[wrong][0]):g}, and a mask holds 0 and 1"
        remedy = "pass the mask of the tokens that are trained; weights of tokens go into the advantages"
        raise DataError(key, problem, remedy)
    return found.bool()


def token_weights(key: str, weights: Any, *, check: bool) -> Tensor:
    """Return weights of tokens, 0 at a masked one; DataError at `key` unless they are finite and at least 0.

    The numbers are looked at with `check`, as in `boolean_mask`.
    """
    found = _tensor(key, weights)
    if check and bool((wrong := ~((found >= 0) & found.isfinite())).any()):
        problem = f"it holds {float(found[wrong][0]):g}, and a weight is a finite number of at least 0"
        raise DataError(key, problem, "pass 0 for each token that is not trained, and 1 for the others")
    return found


def _tensor(key: str, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise DataError(key, f"it is of type {type(mask).__name__}", "pass a tensor of 0 and 1")
    return mask
