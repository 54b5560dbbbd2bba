"""The types that kernels share: what they return, and the shapes of what they take.

Frameworks divide by different numbers, so a kernel never reduces over tokens: see `aggregation.aggregate`.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens = Float[Tensor, "*batch tokens"]
Mask = Bool[Tensor, "*batch tokens"]
Advantages = Float[Tensor, "*#batch #tokens"]  # broadcasts: [B, 1] is one advantage per sequence
Logits = Float[Tensor, "*batch tokens vocab"]
LogProbs = Float[Tensor, "*batch tokens k"]  # of k vocabulary entries per token
VocabIds = Int[Tensor, "*batch tokens k"]
Rewards = Float[Tensor, " rows"]
ReferenceRewards = Float[Tensor, "rows samples"]
GroupIds = Int[Tensor, " rows"]
RowMask = Bool[Tensor, " rows"]
Lengths = Int[Tensor, " rows"] | Float[Tensor, " rows"]
Scores = Float[Tensor, " pairs"]
RowScores = Float[Tensor, " rows"]  # of completions without a partner
Scalar = Float[Tensor, ""]


class Metric(NamedTuple):
    """A detached quantity and where it counts. The adapter takes the mean; of booleans, a fraction."""

    value: Float[Tensor, "..."] | Bool[Tensor, "..."]
    where: Bool[Tensor, "..."]


class TokenLoss(NamedTuple):
    """A loss per token, in nats; exactly 0, with exactly 0 gradient, where the mask is False."""

    loss: Tokens
    metrics: dict[str, Metric]


class PairLoss(NamedTuple):
    """A loss per preference pair, in nats."""

    loss: Scores
    metrics: dict[str, Metric]
