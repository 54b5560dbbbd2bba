"""A CPU that answers to "cuda", and gloo that answers for NCCL: one rank, nothing moved anywhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SILENT = ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize")


def is_cuda(given: Any) -> bool:
    """Whether this argument names a CUDA device."""
    return (isinstance(given, str) and given.split(":")[0] == "cuda") or (
        isinstance(given, torch.device) and given.type == "cuda"
    )


class OnCpu(TorchFunctionMode):
    """Every argument of torch's functions that names a CUDA device names the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple("cpu" if is_cuda(arg) else arg for arg in args)
        return func(*args, **{k: "cpu" if is_cuda(v) else v for k, v in (kwargs or {}).items()})


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """For as long as it lasts, code written for one GPU runs on the CPU."""
    init = dist.init_process_group

    def over_gloo(backend: Any = None, *, timeout: Any = None, device_id: Any = None) -> None:
        init("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch, OnCpu():
        for name in SILENT:
            patch.setattr(torch.cuda, name, lambda *_, **__: None)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda *_, **__: 0)
        patch.setattr(dist, "init_process_group", over_gloo)
        yield
