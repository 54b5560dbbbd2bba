"""A checkout of PRIME-RL whose loss module runs here.

Nothing of it is copied: its folders go on `sys.path`. Packages that it imports and that have no part in a
loss are replaced by empty modules where they are not installed. One checkout per process.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin.upstream import older
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.conformance.stubs import stub

STUBBED = ("wandb", "renderers", "zmq", "verifiers")
# The classes of `[trainer.loss]` by its type.
CONFIGS = {"default": "DefaultLossConfig", "ipo": "IPOLossConfig", "custom": "CustomLossConfig"}


class Upstream(NamedTuple):
    """What of a checkout is compared."""

    loss: ModuleType
    config: ModuleType

    def loss_fn(self, **table: Any) -> Callable[[Any], Any]:
        """Its own function for `[trainer.loss]`, as its trainer sets it up."""
        config = getattr(self.config, CONFIGS[table["type"]])(**table)
        fn: Callable[[Any], Any] = self.loss.setup_rl_loss_fn(config)
        return fn

    def compute_loss(self, pack: Pack, fn: Any, scale: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Its own compute_loss of a micro-batch."""
        total: tuple[Tensor, dict[str, Tensor]] = self.loss.compute_loss(
            pack.trainer_logprobs,
            pack.inference_logprobs,
            pack.reference,
            pack.advantages,
            pack.loss_mask,
            pack.weights,
            None,
            None,
            fn,
            scale,
            1,
            1,
        )
        return total


def load(checkout: Path) -> Upstream:
    """Import the checkout's loss and its configuration."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it compiles is not the loss
    stub(*STUBBED)
    folders = [checkout / "src", checkout / "packages" / "prime-rl-configs" / "src"]
    sys.path[:0] = [str(folder) for folder in folders if folder.is_dir()]
    loss = import_module("prime_rl.trainer.rl.loss")
    assert Path(loss.__file__ or "").is_relative_to(checkout), f"{loss.__file__} is not of {checkout}"
    if not hasattr(loss, "setup_rl_loss_fn"):
        raise older(f"in {checkout}")
    return Upstream(loss, import_module("prime_rl.configs.trainer"))


def loss_functions(upstream: Upstream) -> set[str]:
    """The names of the losses in its loss module."""
    return {
        name for name in vars(upstream.loss) if name.endswith("_loss_fn") and not name.startswith("setup_")
    }
