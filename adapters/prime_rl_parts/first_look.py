"""What is looked at when LossInputs come for the first time, and again when another stream joins them."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_parts.config import TABLE, Channels
from composer_plugins.errors import ConfigError, DataError

STREAMS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")


def check_fields(channels: Channels, inputs: Any) -> None:
    """Raise ConfigError for a channel that these LossInputs have no field for."""
    config = channels.config
    if config.replay_weight and not hasattr(inputs, "loss_weights"):
        raise ConfigError(
            f"[{TABLE}] replay_weight > 0: a pair's coefficient comes in loss_weights, which PRIME-RL has "
            "since 0.7, and these LossInputs have none; upgrade, or set replay_weight = 0"
        )
    learns = channels.hint is not None or "teacher_logprobs" in channels.policy.loss.needs
    if learns and not (hasattr(inputs, "ref_logprobs") or hasattr(inputs, "teacher_logprobs")):
        raise ConfigError(
            f"[{TABLE}] a hint needs a reference, and these LossInputs have neither ref_logprobs nor "
            "teacher_logprobs; set hint_weight = 0"
        )


def check_tensors(inputs: Any, reference: Tensor | None, weights: Tensor | None) -> None:
    """Raise DataError for another kind or shape; values are not looked at, which would wait."""
    given = {name: getattr(inputs, name, None) for name in STREAMS}
    if missing := [name for name, x in given.items() if x is None]:
        raise DataError(f"PRIME-RL's LossInputs without {', '.join(missing)}")
    given |= {"the reference": reference, "loss_weights": weights}
    mask = inputs.loss_mask
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        raise DataError(
            f"loss_mask is {getattr(mask, 'dtype', type(mask).__name__)}; wanted booleans: .bool()"
        )
    for name, x in given.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or not (x.dtype.is_floating_point or name == "loss_mask"):
            raise DataError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}; wanted floating point")
        if x.dim() != 1 or x.shape != mask.shape or not x.numel():
            raise DataError(
                f"{name} is {tuple(x.shape)} and loss_mask {tuple(mask.shape)}; wanted [tokens] for both, "
                "one packed sequence"
            )
