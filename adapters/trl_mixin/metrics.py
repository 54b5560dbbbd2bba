"""The metrics of the channels, and the check of the loss: one transfer per micro-batch carries both."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.finite import not_finite_error
from composer_plugins.errors import ComposerWarning
from composer_plugins.kernels.types import Metric


class Logged(NamedTuple):
    """What a channel logs of one micro-batch."""

    channel: str
    parts: dict[str, tuple[Tensor, Tensor]]  # by metric, its sum [] and its count [] on this process
    inputs: Mapping[str, Tensor]  # which a value that is not finite may come from, with a "mask"
    metrics: Mapping[str, Metric]  # of the loss, per token
    how: Mapping[str, Any] = {}  # it was reduced: the loss, its counts and the factor, for a record


def warn_once(warned: set[str], message: str) -> None:
    """Warn, unless a warning with the same key, which is the message up to its colon, is in `warned`."""
    if (key := message.partition(":")[0]) not in warned:
        warned.add(key)
        warnings.warn(message, ComposerWarning, stacklevel=3)


def log(
    trainer: GRPOTrainer, channels: Sequence[Logged], loss: Tensor, own: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Add the metrics to the means that TRL logs next, over all ranks; DataError if a value is not finite.

    A metric without any unmasked element is left out. All ranks must pass the same names: one reduction
    carries every value, and the whole `loss`. `own` gives the inputs of TRL's own terms of it.
    """
    parts = [(one, name, part) for one in channels for name, part in one.parts.items()]
    values = [value.float() for _, _, part in parts for value in part]
    stacked = torch.stack([*values, loss.detach().float()])
    *totals, whole = trainer.accelerator.reduce(stacked, reduction="sum").tolist()
    for (one, name, _), total, count in zip(parts, totals[::2], totals[1::2], strict=True):
        if not math.isfinite(total):
            what = "loss" if name == "loss" else f"metric {name!r}"
            raise not_finite_error(
                trainer, f"the {one.channel} channel", f"its {what} is {total}", one.inputs
            )
        if count:
            upstream.add_to_mean(trainer, f"composer/{one.channel}/{name}", total, count)
    if not math.isfinite(whole):
        raise not_finite_error(trainer, "TRL's own loss", f"with it the whole loss is {whole}", own())
