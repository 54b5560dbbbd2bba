"""Means over tokens, whatever the cuts: verl's own are means over micro-batches, empty ones too.

A worker hands over sums, verl adds them up and averages over ranks and mini-batches, and the trainer
divides: what is done to the sums is done to the counts.
"""

from collections.abc import Mapping
from typing import Any

from verl.utils.metric import AggregationType, Metric

POLICY, HINT = "actor/composer/", "actor/composer/hint/"
SUM, COUNT = "#sum", "#tokens"


def sums(means: Mapping[str, float], tokens: int, of: str) -> dict[str, Metric]:
    """The means over so many tokens as sums, and the number of tokens."""
    found = {f"{name}{SUM}": mean * tokens for name, mean in means.items()}
    return Metric.from_dict(found | {f"{of}{COUNT}": float(tokens)}, AggregationType.SUM)


def settle(metrics: dict[str, Any]) -> None:
    """Put the means in the place of the sums; none where there was no token."""
    counts = {of: metrics.pop(f"{of}{COUNT}", 0.0) for of in (HINT, POLICY)}
    for name in [name for name in metrics if name.endswith(SUM)]:
        total, mean = metrics.pop(name), name.removesuffix(SUM)
        if count := counts[HINT if mean.startswith(HINT) else POLICY]:
            metrics[mean] = total / count
