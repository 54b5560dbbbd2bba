"""Means over tokens that do not depend on how a batch is cut. verl's own are means over micro-batches.

A worker returns sums and counts. verl adds them up, and averages them over ranks and mini-batches. The
trainer then divides, so whatever verl does to the sums it does to the counts too.
"""

from collections.abc import Mapping
from typing import Any

from verl.utils.metric import AggregationType, Metric

POLICY, HINT, REPLAY = (f"actor/composer/{channel}/" for channel in ("policy", "hint", "replay"))
SUM, COUNT = "#sum", "#tokens"


def means_to_sums(means: Mapping[str, float], tokens: int, channel: str) -> dict[str, Metric]:
    """Return means over `tokens` tokens as sums, and the number of tokens."""
    found = {f"{name}{SUM}": mean * tokens for name, mean in means.items()}
    return Metric.from_dict(found | {f"{channel}{COUNT}": float(tokens)}, AggregationType.SUM)


def sums_to_means(metrics: dict[str, Any]) -> None:
    """Replace the sums by means; a channel without a token has none."""
    counts = {channel: metrics.pop(f"{channel}{COUNT}", 0.0) for channel in (HINT, POLICY)}
    for name in [name for name in metrics if name.endswith(SUM)]:
        total, mean = metrics.pop(name), name.removesuffix(SUM)
        if count := counts[HINT if mean.startswith(HINT) else POLICY]:
            metrics[mean] = total / count
