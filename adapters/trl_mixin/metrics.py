"""Logging under `composer/`, gathered over ranks in one reduction and one device sync per step."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.kernels.contract import Metric


def log_metrics(trainer: Any, metrics: dict[str, Metric]) -> None:
    """Append the global mean of each metric, over where it counts, as TRL appends its own.

    A metric that counts nowhere on any rank is left out. Every rank must pass the same keys.
    """
    mode = "train" if trainer.model.training else "eval"
    sums = [torch.where(where, value, 0.0).sum().float() for value, where in metrics.values()]
    counts = [where.sum().float() for _, where in metrics.values()]
    totals = trainer.accelerator.reduce(torch.stack([*sums, *counts]), reduction="sum").tolist()
    for i, name in enumerate(metrics):
        if count := totals[len(sums) + i]:
            trainer._metrics[mode][f"composer/{name}"].append(totals[i] / count)


def scalar(value: Tensor) -> Metric:
    """One number per rank."""
    value = value.detach()
    return Metric(value, torch.ones_like(value, dtype=torch.bool))


def under(prefix: str, metrics: dict[str, Metric], live: Tensor | None = None) -> dict[str, Metric]:
    """A kernel's metrics under a channel's name, counted only where `live`."""
    return {
        f"{prefix}/{name}": Metric(m.value, m.where if live is None else m.where & live)
        for name, m in metrics.items()
    }
