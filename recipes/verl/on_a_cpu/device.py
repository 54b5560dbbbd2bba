"""Register the CPU as a platform of verl, with verl's FSDP engine on it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import verl.utils.distributed as distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from composer_plugins.recipes.verl.on_a_cpu import PLATFORM

NOTHING = (
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
)
ZERO = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def always(value: Any) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns the value."""
    return lambda *_, **__: value


nothing = always(None)


def device_module() -> ModuleType:
    """torch.cpu with the functions of torch.cuda that verl calls."""
    module = ModuleType("cpu_as_a_device")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[:2] != "__"})
    module.__dict__.update(dict.fromkeys(NOTHING, nothing))
    module.__dict__.update(dict.fromkeys(ZERO, always(0)))
    module.__dict__.update(
        is_available=always(False),  # so that verl does not measure the memory of a GPU
        get_device_name=always("CPU"),
        mem_get_info=always((1, 1)),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform=PLATFORM)
class CPU(PlatformBase):
    """One device, which is declared to Ray as a GPU, because a worker of verl asks for one."""

    device_name = "cpu"
    vendor_name = PLATFORM
    device_module = device_module()
    is_available = always(True)
    is_ipc_supported = always(False)
    current_device = always(torch.device("cpu"))
    device_count = always(1)
    get_device_capability = always((None, None))
    communication_backend_name = always("gloo")
    ray_resource_name = always("GPU")
    ray_noset_envvars = always([])
    visible_devices_envvar = always("CUDA_VISIBLE_DEVICES")
    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def manual_seed(self, seed: int) -> None:
        """Seed the one device."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether VERL_PLATFORM names this platform."""
        return os.environ.get("VERL_PLATFORM") == PLATFORM

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing: there is no profiler."""
        yield


# This must precede the import of the engine, which imports the function by name.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

import verl.workers.engine.fsdp.transformer_impl as fsdp  # noqa: E402
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # noqa: E402

# verl puts the reference policy in pinned memory, for which there must be a GPU.
fsdp.CPUOffloadPolicy = always(fsdp.CPUOffloadPolicy(pin_memory=False))


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class Engine(FSDPEngineWithLMHead):
    """verl's own engine, which verl registers for GPUs only."""
