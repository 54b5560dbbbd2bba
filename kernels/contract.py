"""What a kernel returns: a loss per token (or per pair) and the quantities one logs beside it.

Frameworks divide by different things, so a kernel never reduces: see `aggregation.aggregate`.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class Metric(NamedTuple):
    """A detached quantity and where it counts; the adapter chooses the mean. Of booleans: the fraction."""

    value: Float[Tensor, "..."] | Bool[Tensor, "..."]
    where: Bool[Tensor, "..."]


class TokenLoss(NamedTuple):
    """A loss per token, in nats; exactly 0, with exactly 0 gradient, where the mask is False."""

    loss: Float[Tensor, "*batch tokens"]
    metrics: dict[str, Metric]


class PairLoss(NamedTuple):
    """A loss per preference pair, in nats."""

    loss: Float[Tensor, " pairs"]
    metrics: dict[str, Metric]
