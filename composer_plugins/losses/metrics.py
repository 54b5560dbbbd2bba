"""The metrics of a loss as numbers for a framework's log."""

from collections.abc import Mapping

import torch

from composer_plugins.kernels.types import Metric


def means(metrics: Mapping[str, Metric], prefix: str) -> dict[str, float]:
    """Return the mean of each metric over its `where`, with one transfer from the device."""
    if not metrics:
        return {}
    found = [
        torch.where(where, value, 0.0).sum() / where.sum().clamp(min=1) for value, where in metrics.values()
    ]
    values = torch.stack(found).tolist()
    return {f"{prefix}{name}": value for name, value in zip(metrics, values, strict=True)}
