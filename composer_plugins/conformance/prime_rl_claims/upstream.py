"""A checkout of PRIME-RL, v0.4 to today, whose loss module runs here.

Nothing of it is copied: its folders go on `sys.path`. Packages that it imports and that have no part in a
loss are replaced by empty modules where they are not installed. One checkout per process.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin.doctor import probe
from composer_plugins.adapters.prime_rl_plugin.upstream import INSTALLATION, generation_by_features
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.conformance.stubs import stub
from composer_plugins.frameworks.prime_rl import Generation

STUBBED = ("wandb", "renderers", "zmq", "verifiers")
# The classes of `[trainer.loss]` by its type.
CONFIGS = {"default": "DefaultLossConfig", "ipo": "IPOLossConfig", "icepop": "IcePopLossConfig"}
CONFIGS |= {"ppo": "PPOLossConfig", "cispo": "CISPOLossConfig", "custom": "CustomLossConfig"}


class Upstream(NamedTuple):
    """What of a checkout is compared."""

    version: str  # "v0.5.0", or the newest recorded generation for anything later
    generation: Generation
    loss: ModuleType
    config: ModuleType

    def loss_fn(self, **table: Any) -> Callable[[Any], Any]:
        """Its own function for `[trainer.loss]`, as its trainer sets it up."""
        config = getattr(self.config, CONFIGS[table["type"]], None) or self.config.LossConfig  # of v0.4
        config = config(**table)
        if hasattr(self.loss, "setup_rl_loss_fn"):
            fn = self.loss.setup_rl_loss_fn(config)
        elif hasattr(self.loss, "setup_loss_fns"):
            fn = self.loss.setup_loss_fns(config)["rl"]
        else:
            fn = self.loss.setup_loss_fn(config)
        called: Callable[[Any], Any] = getattr(fn, "loss", fn)  # an object with a method since September 2026
        return called

    def compute_loss(self, pack: Pack, fn: Any, scale: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Its own compute_loss of a micro-batch."""
        given = (
            pack.trainer_logprobs,
            pack.inference_logprobs,
            pack.reference,
            pack.advantages,
            pack.loss_mask,
        )
        if hasattr(self.loss, "setup_rl_loss_fn"):
            fn = fn if not hasattr(fn, "loss") else SimpleNamespace(loss=fn)
            result = self.loss.compute_loss(*given, pack.weights, None, None, fn, scale, 1, 1)
        elif hasattr(self.loss, "setup_loss_fns"):
            result = self.loss.compute_loss(*given, loss_fns={"rl": fn}, loss_scale=scale)
        else:
            result = self.loss.compute_loss(*given, fn, scale)
        total: tuple[Tensor, dict[str, Tensor]] = result
        return total


def load(checkout: Path) -> Upstream:
    """Import the checkout's loss and its configuration."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it compiles is not the loss
    stub(*STUBBED)
    folders = [checkout / "src", checkout / "packages" / "prime-rl-configs" / "src"]
    sys.path[:0] = [str(folder) for folder in folders if folder.is_dir()]
    loss = import_module("prime_rl.trainer.rl.loss")
    try:
        config = import_module("prime_rl.configs.trainer")
    except ModuleNotFoundError:
        config = import_module("prime_rl.trainer.rl.config")
    assert Path(loss.__file__ or "").is_relative_to(checkout), f"{loss.__file__} is not of {checkout}"
    _, features = probe.release(*INSTALLATION)
    generation = generation_by_features(features)
    assert generation is not None, f"{checkout} is of no release that is known"
    version = "v0.5.0" if hasattr(config, "SFTLossConfig") else "v0.4.0"
    if hasattr(loss, "setup_rl_loss_fn"):
        version = "v0.8.0"
    elif hasattr(loss, "setup_loss_fns"):
        version = "v0.6.0"
    return Upstream(version, generation, loss, config)


def loss_functions(upstream: Upstream) -> set[str]:
    """The names of the losses in its loss module."""
    return {
        name for name in vars(upstream.loss) if name.endswith("_loss_fn") and not name.startswith("setup_")
    }
