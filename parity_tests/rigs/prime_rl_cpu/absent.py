"""Packages that PRIME-RL's trainer imports and that no step here calls: empty ones stand in for them."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pydantic_core import core_schema

PACKAGES = (
    "datasets",  # supervised training
    "deep_gemm",  # fp8
    "dion",  # another optimiser
    "fla",  # linear attention
    "grpc",  # moving weights to the samplers
    "modelexpress",  # moving weights
    "openai",  # asking the samplers
    "orjson",  # recording episodes
    "pandas",  # tables of benchmarks
    "prime_cli",  # its makers' platform
    "prometheus_client",  # a metrics server
    "psutil",  # a log of memory
    "pyarrow",  # exporting tokens
    "pynvml",  # which cores are near which GPU
    "renderers",  # chat templates
    "requests",  # a heartbeat
    "ring_flash_attn",  # context parallelism
    "setproctitle",
    "tenacity",  # asking the samplers again
    "tilelang",  # GPU kernels
    "torchao",  # fp8
    "torchdata",  # supervised training
    "torchtitan",  # expert parallelism; its clip_grad_norm_ becomes torch's
    "triton",  # GPU kernels
    "verifiers",  # environments
    "vllm",  # sampling
    "wandb",  # metrics, which go into a file here
    "wandb_gql",
    "wandb_workspaces",
    "zmq",  # batches from the orchestrator
)


class Named(type):
    """A class any attribute of which is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, _: Any) -> Any:
        return Any

    __ror__ = __or__


class Anything(metaclass=Named):
    """Stands in for a class that is subclassed or annotated with, or a function that decorates."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return core_schema.any_schema()


class Empty(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Finder:
    """Finds an empty module for every name below one of `packages`."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Asked last, so that what is installed is found first."""
        return ModuleSpec(name, self) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """What `import` puts into sys.modules."""
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def stand_in() -> list[str]:
    """From here on these packages import, empty where they are not installed; which those are."""
    gone = [name for name in PACKAGES if find_spec(name) is None]
    sys.meta_path.append(Finder(gone))
    return gone
