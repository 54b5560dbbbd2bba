"""Weights that FSDP2 or DeepSpeed ZeRO-3 has cut into shards, one on each process.

FSDP2 makes a parameter a DTensor, and for a forward and backward pass the gathered tensor. ZeRO-3 keeps a
shard, flat and padded, in `ds_tensor`, and empties the parameter where it is not gathered.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer


def is_sharded(trainer: GRPOTrainer) -> bool:
    """Whether the policy's weights are cut into shards when it trains."""
    return bool(trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled())


def is_partitioned(model: nn.Module) -> bool:
    """Whether ZeRO-3 has cut the model while it was loaded."""
    return any(map(_is_partitioned, model.parameters()))


def _is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def gathered(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """A context in which a parameter that ZeRO-3 has cut is whole, to read it. All processes enter it."""
    if not _is_partitioned(parameter):
        return nullcontext()
    import deepspeed  # a package of its own, which only its users install

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return context


def reshard(trainer: GRPOTrainer) -> None:
    """Free what has been gathered of the policy, so that its next forward or backward pass gathers again."""
    for module in trainer.accelerator.unwrap_model(trainer.model).modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    optimizer: Any = getattr(trainer.model_wrapped, "optimizer", None)  # DeepSpeed's engine has one
    if hasattr(optimizer, "empty_partition_cache"):
        optimizer.empty_partition_cache()


def parameters_of(trainer: GRPOTrainer) -> dict[str, nn.Parameter]:
    """The policy's parameters by name, after `reshard`: FSDP2 exchanges them for the gathered ones."""
    reshard(trainer)
    return dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())


def shard(parameter: Any) -> Tensor:
    """This process's part of a parameter, after `reshard`; the whole where it is not cut."""
    part: Tensor = parameter.ds_tensor if _is_partitioned(parameter) else parameter
    return part.detach()


def whole(trainer: GRPOTrainer, part: Tensor, parameter: Any) -> Tensor:
    """The whole tensor of which every process has a part as of `shard(parameter)`."""
    part = part.to(trainer.accelerator.device)  # from the CPU, if shards are kept there
    if isinstance(part, DTensor):
        return part.full_tensor()
    if _is_partitioned(parameter):
        flat: Tensor = trainer.accelerator.gather(part)
        return flat[: parameter.ds_numel].view(parameter.ds_shape)
    return part


def cut(trainer: GRPOTrainer, tensor: Tensor, parameter: Any) -> Tensor:
    """This process's part of a whole tensor, as of `shard(parameter)`."""
    if isinstance(parameter, DTensor):
        placed = tensor.to(parameter.device)
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)
    if _is_partitioned(parameter):
        size = parameter.ds_tensor.numel()
        first = size * trainer.accelerator.process_index
        mine = tensor.flatten()[first : first + size]
        return torch.nn.functional.pad(mine, (0, size - len(mine))).to(parameter.ds_tensor.device)
    return tensor.to(parameter.device)


@contextmanager
def with_weights(trainer: GRPOTrainer, parts: dict[str, Tensor]) -> Iterator[None]:
    """Let the policy compute with other weights, of which every process has a part as of `shard`.

    Its own are back afterwards, so that a forward pass before can have its backward pass after. A parameter
    that is not cut keeps its memory, and a shard its memory's address.
    """
    if not parts:
        yield
        return
    named = parameters_of(trainer)
    parameters = {name: named[name] for name in parts}
    if is_sharded(trainer):
        own = {name: shard(parameter).clone() for name, parameter in parameters.items()}
    else:
        own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        _put(trainer, parameters, parts)
        yield
    finally:
        reshard(trainer)
        _put(trainer, parameters, own)


@contextmanager
def without_adapter(trainer: GRPOTrainer, policy: Any) -> Iterator[None]:
    """Let a PEFT model compute without its adapter.

    PEFT switches `requires_grad` of the adapter off, and afterwards on, of frozen weights too, so each
    weight gets its own back. Both must reach the same parameters, and FSDP2 exchanges the parameters of a
    module when it gathers it.
    """
    is_trained = {name: parameter.requires_grad for name, parameter in parameters_of(trainer).items()}
    try:
        with policy.disable_adapter():
            try:
                yield
            finally:
                reshard(trainer)
    finally:
        for name, parameter in parameters_of(trainer).items():
            parameter.requires_grad_(is_trained[name])


def _put(trainer: GRPOTrainer, parameters: dict[str, nn.Parameter], parts: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if is_sharded(trainer):
            with torch.no_grad():
                shard(parameter).copy_(parts[name])
        else:
            parameter.data = parts[name].to(parameter)
