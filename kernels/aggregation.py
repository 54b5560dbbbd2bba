"""From a loss per token to a scalar: the one home of reduction, with the denominators in the open.

Most bugs reported against RL trainers are wrong denominators. A framework that cuts its batch into
micro-batches or ranks must pass the count of the *whole* batch, or the gradient depends on the cut.
"""

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep, masked_mean, masked_sum

Mode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
Count = int | float | Float[Tensor, ""] | Int[Tensor, ""]
Tokens = Float[Tensor, "*batch tokens"]
Mask = Bool[Tensor, "*batch tokens"]
Scalar = Float[Tensor, ""]


def aggregate(
    token_loss: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
    mode: Mode,
    *,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    max_length: int | float | None = None,
) -> Float[Tensor, ""]:
    """Reduce a loss per token to a scalar, in verl's vocabulary of modes.

        token-mean                sum_it x_it / num_tokens
        token-sum                 sum_it x_it
        seq-mean-token-sum        sum_i (sum_t x_it) / num_sequences
        seq-mean-token-mean       sum_i (sum_t x_it / |y_i|) / num_sequences
        seq-mean-token-sum-norm   sum_i (sum_t x_it / max_length) / num_sequences     (Dr. GRPO)

    Only live tokens (`mask`) enter a sum, and |y_i| counts those of row i. The denominators:

    - `num_tokens`: None means the live tokens of this mask.
    - `num_sequences`: None means the rows of this mask with at least one live token, as in verl; TRL
      counts every row: pass `mask.shape[0]`.
    - `max_length`: a constant (TRL: `max_completion_length`); "seq-mean-token-sum-norm" needs it.

    A denominator below 1 counts as 1, so an empty batch gives 0, still attached to the graph. A
    1-dimensional input is one sequence.

    Raises ValueError for an unknown mode and for a missing `max_length`.

    Departs from verl 0.9.1 `agg_loss`: (1) verl gives NaN for an empty batch, (2) verl divides a row by
    |y_i| + 1e-8 (rounded away unless its mask is float64), (3) verl's default `max_length` is the padded
    width, which varies by batch.
    Source: verl 0.9.1 trainer/ppo/core_algos.py agg_loss; TRL 1.16 trainer/grpo_trainer.py _compute_loss.
    """
    if mode == "token-mean":
        return token_mean(token_loss, mask, num_tokens=num_tokens)
    if mode == "token-sum":
        return token_sum(token_loss, mask)
    if mode == "seq-mean-token-sum":
        return seq_mean_token_sum(token_loss, mask, num_sequences=num_sequences)
    if mode == "seq-mean-token-mean":
        return seq_mean_token_mean(token_loss, mask, num_sequences=num_sequences)
    if mode != "seq-mean-token-sum-norm":
        raise ValueError(f"unknown aggregation mode {mode!r}; known: {', '.join(Mode.__args__)}")
    if max_length is None:
        raise ValueError(
            "mode 'seq-mean-token-sum-norm' divides by a constant length: pass max_length (TRL: "
            "max_completion_length; verl: loss_scale_factor, or the padded width)"
        )
    return seq_mean_token_sum_norm(token_loss, mask, max_length=max_length, num_sequences=num_sequences)


def token_mean(token_loss: Tokens, mask: Mask, *, num_tokens: Count | None = None) -> Scalar:
    """The sum over live tokens / `num_tokens` (None: the live tokens of this mask): DAPO's."""
    return token_sum(token_loss, mask) / _at_least_one(mask.sum() if num_tokens is None else num_tokens)


def token_sum(token_loss: Tokens, mask: Mask) -> Scalar:
    """The sum over live tokens: for a caller that divides itself, as PRIME-RL's trainer does."""
    return keep(at_least_float32(token_loss), mask).sum()


def seq_mean_token_sum(token_loss: Tokens, mask: Mask, *, num_sequences: Count | None = None) -> Scalar:
    """The mean over sequences of a sequence's sum: a long one counts for more."""
    return _sequence_mean(masked_sum(at_least_float32(token_loss), mask), mask, num_sequences)


def seq_mean_token_mean(token_loss: Tokens, mask: Mask, *, num_sequences: Count | None = None) -> Scalar:
    """The mean over sequences of a sequence's mean: GRPO's paper; a token of a long one counts for less."""
    return _sequence_mean(masked_mean(at_least_float32(token_loss), mask), mask, num_sequences)


def seq_mean_token_sum_norm(
    token_loss: Tokens, mask: Mask, *, max_length: int | float, num_sequences: Count | None = None
) -> Scalar:
    """The mean over sequences of a sequence's sum / `max_length`, a constant: Dr. GRPO's."""
    per_sequence = seq_mean_token_sum(token_loss, mask, num_sequences=num_sequences)
    return per_sequence / _at_least_one(max_length)


def _sequence_mean(per_sequence: Tensor, mask: Mask, num_sequences: Count | None) -> Scalar:
    live_rows = mask.any(-1).sum() if num_sequences is None else num_sequences
    return per_sequence.sum() / _at_least_one(live_rows)


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
