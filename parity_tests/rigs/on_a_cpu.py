"""What the tests change so that accelerate and DeepSpeed shard a model on a CPU as they do on GPUs."""

import os
from typing import Any


def shard_with_fsdp() -> None:
    """Let accelerate use FSDP on a CPU. Without this it wraps the model in DDP, without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    constructed = AcceleratorState.__init__

    def construct(self: Any, *args: Any, **options: Any) -> None:
        constructed(self, *args, **options)
        if options.get("fsdp_plugin") is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, options["fsdp_plugin"]
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = construct


def compile_nothing() -> None:
    """Let DeepSpeed use gloo. Otherwise it compiles an operation for shared memory, for a minute or two."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def of_this_launch() -> None:
    """Change what the engine needs that `accelerate launch` has chosen; sitecustomize.py calls it."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_with_fsdp()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        compile_nothing()
