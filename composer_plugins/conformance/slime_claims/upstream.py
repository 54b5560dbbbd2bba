"""A checkout of slime, whose dispatcher of losses runs here, without Megatron and on one rank.

Nothing of it is copied: its folder goes on `sys.path`. Packages that it imports and that have no part in a
loss are replaced by empty modules where they are not installed, and Megatron's `mpu` by one that knows a
single rank.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from composer_plugins.conformance.stubs import Empty, stub
from composer_plugins.errors import ConfigError

STUBBED = ("megatron", "ray", "httpx", "sglang", "sglang_router", "transformers", "wandb", "aiohttp", "tqdm")
# What of Megatron's mpu is asked for, with the answers of a single rank.
ONE_RANK = {
    **dict.fromkeys(("get_context_parallel_world_size", "get_tensor_model_parallel_world_size"), 1),
    **dict.fromkeys(("get_context_parallel_rank", "get_tensor_model_parallel_rank"), 0),
    **dict.fromkeys(("get_context_parallel_group", "get_tensor_model_parallel_group"), None),
    "get_data_parallel_world_size": 1,
}


class Upstream(NamedTuple):
    """What of a checkout is compared."""

    loss: ModuleType

    def loss_of(
        self, args: Namespace, batch: Mapping[str, Any], logits: Tensor, micro_batches: int, size: int
    ) -> tuple[Tensor, Tensor]:
        """The loss of one micro-batch by slime's dispatcher, and what Megatron divides it by."""
        loss, count, _ = self.loss.loss_function(args, dict(batch), micro_batches, size, logits)
        return loss, count


def answer(value: Any) -> Any:
    """A function that returns this, whatever it is asked with."""
    return lambda *_, **__: value


def one_rank() -> ModuleType:
    """Megatron's mpu, where Megatron is not installed, for a single rank."""
    mpu = Empty("megatron.core.mpu")
    for name, value in ONE_RANK.items():
        setattr(mpu, name, answer(value))
    sys.modules["megatron.core.mpu"] = mpu
    core: Any = import_module("megatron.core")
    core.mpu = mpu
    return mpu


def load(checkout: Path) -> Upstream:
    """Import the checkout's module of losses."""
    if not (checkout / "slime" / "backends" / "megatron_utils" / "loss.py").is_file():
        problem = f"{checkout} is not a checkout of slime with slime/backends/megatron_utils/loss.py"
        raise ConfigError("--source", problem, "git clone https://github.com/THUDM/slime")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it compiles is the same without
    stub(*STUBBED)
    one_rank()
    sys.path.insert(0, str(checkout))
    package = "slime.backends.megatron_utils"
    if package not in sys.modules:  # its own __init__ patches Megatron
        found = ModuleType(package)
        found.__path__ = [str(checkout / "slime" / "backends" / "megatron_utils")]
        sys.modules[package] = found
    loss = import_module(f"{package}.loss")
    assert Path(loss.__file__ or "").is_relative_to(checkout), f"{loss.__file__} is not of {checkout}"
    return Upstream(loss)
