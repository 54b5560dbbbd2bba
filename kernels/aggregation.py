"""Reduce a loss per token to a scalar, with explicit denominators.

Most bugs reported against RL trainers are wrong denominators. A framework that cuts its batch into
micro-batches or ranks must pass the count of the *whole* batch, or the gradient depends on the cut.
"""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from composer_plugins.kernels.groups import grouped
from composer_plugins.kernels.masking import at_least_float32, keep, masked_mean, masked_sum
from composer_plugins.kernels.types import GroupIds, Lengths, Mask, Scalar, TokenLoss, Tokens

Mode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]
Count = int | float | Scalar | Int[Tensor, ""]


def aggregate(
    token_loss: Tokens,
    mask: Mask,
    mode: Mode,
    *,
    num_tokens: Count | None = None,
    num_sequences: Count | None = None,
    max_length: int | float | None = None,
    group_ids: GroupIds | None = None,
    prompt_tokens: Lengths | None = None,
    num_prompts: Count | None = None,
) -> Scalar:
    """Reduce a loss per token to a scalar, with verl's names of the modes (and SkyRL's prompt-mean).

        token-mean                sum_it x_it / num_tokens                                     (DAPO)
        token-sum                 sum_it x_it
        seq-mean-token-sum        sum_i (sum_t x_it) / num_sequences
        seq-mean-token-mean       sum_i (sum_t x_it / |y_i|) / num_sequences                   (GRPO)
        seq-mean-token-sum-norm   sum_i (sum_t x_it / max_length) / num_sequences              (Dr. GRPO)
        prompt-mean               sum_i (sum_t x_it / prompt_tokens_i) / num_prompts           (SkyRL)

    Only unmasked tokens enter a sum, and |y_i| is their number in row i. The denominators:

    - `num_tokens`: None means the unmasked tokens of this mask.
    - `num_sequences`: None means the rows of this mask with at least one unmasked token, as in verl; TRL
      counts every row: pass `mask.shape[0]`.
    - `max_length`: a constant (TRL: `max_completion_length`); "seq-mean-token-sum-norm" needs it.
    - `prompt_tokens`: for each row, the unmasked tokens of all rollouts of its prompt; None counts those of
      this mask, by `group_ids`. `num_prompts`: None means the different ids of `group_ids`.

    A denominator below 1 counts as 1, so an empty batch gives 0, still attached to the graph. A
    1-dimensional input is one sequence.

    Raises ValueError for an unknown mode and for a missing `max_length` or `group_ids`, and TypeError for a
    TokenLoss: pass its field `loss`.

    Departs from verl 0.9.1 `agg_loss`: (1) verl gives NaN for an empty batch, (2) verl divides a row by
    |y_i| + 1e-8 (rounded away unless its mask is float64), (3) verl's default `max_length` is the padded
    width, which varies by batch.
    Source: verl 0.9.1 trainer/ppo/core_algos.py agg_loss; TRL 1.16 trainer/grpo_trainer.py _compute_loss;
    NovaSky-AI/SkyRL skyrl/backends/skyrl_train/utils/ppo_utils.py@a956457.
    """
    if isinstance(token_loss, TokenLoss):
        raise TypeError("aggregate reduces a tensor, and got a TokenLoss: pass its field loss, result.loss")
    if mode == "token-mean":
        return token_mean(token_loss, mask, num_tokens=num_tokens)
    if mode == "token-sum":
        return token_sum(token_loss, mask)
    if mode == "seq-mean-token-sum":
        return seq_mean_token_sum(token_loss, mask, num_sequences=num_sequences)
    if mode == "seq-mean-token-mean":
        return seq_mean_token_mean(token_loss, mask, num_sequences=num_sequences)
    if mode == "prompt-mean":
        if group_ids is None:
            raise ValueError("mode 'prompt-mean' averages by prompt: pass group_ids, one id per row")
        return prompt_mean(token_loss, mask, group_ids, prompt_tokens=prompt_tokens, num_prompts=num_prompts)
    if mode != "seq-mean-token-sum-norm":
        raise ValueError(f"unknown aggregation mode {mode!r}; known: {', '.join(Mode.__args__)}")
    if max_length is None:
        raise ValueError(
            "mode 'seq-mean-token-sum-norm' divides by a constant length: pass max_length (TRL: "
            "max_completion_length; verl: loss_scale_factor, or the padded width)"
        )
    return seq_mean_token_sum_norm(token_loss, mask, max_length=max_length, num_sequences=num_sequences)


def token_mean(token_loss: Tokens, mask: Mask, *, num_tokens: Count | None = None) -> Scalar:
    """The sum over unmasked tokens / `num_tokens` (None: the unmasked tokens of this mask): DAPO's."""
    return token_sum(token_loss, mask) / _at_least_one(mask.sum() if num_tokens is None else num_tokens)


def token_sum(token_loss: Tokens, mask: Mask) -> Scalar:
    """The sum over unmasked tokens, for a caller that divides it, as PRIME-RL's trainer does."""
    return keep(at_least_float32(token_loss), mask).sum()


def seq_mean_token_sum(token_loss: Tokens, mask: Mask, *, num_sequences: Count | None = None) -> Scalar:
    """The mean over sequences of the sum over tokens: a long sequence weighs more."""
    return _sequence_mean(masked_sum(at_least_float32(token_loss), mask), mask, num_sequences)


def seq_mean_token_mean(token_loss: Tokens, mask: Mask, *, num_sequences: Count | None = None) -> Scalar:
    """The mean over sequences of the mean over tokens: GRPO's; a token of a long sequence weighs less."""
    return _sequence_mean(masked_mean(at_least_float32(token_loss), mask), mask, num_sequences)


def seq_mean_token_sum_norm(
    token_loss: Tokens, mask: Mask, *, max_length: int | float, num_sequences: Count | None = None
) -> Scalar:
    """The mean over sequences of the sum over tokens / `max_length`, a constant: Dr. GRPO's."""
    per_sequence = seq_mean_token_sum(token_loss, mask, num_sequences=num_sequences)
    return per_sequence / _at_least_one(max_length)


def prompt_mean(
    token_loss: Tokens,
    mask: Mask,
    group_ids: GroupIds,
    *,
    prompt_tokens: Lengths | None = None,
    num_prompts: Count | None = None,
) -> Scalar:
    """The mean over prompts of the mean over all tokens of a prompt's rollouts: SkyRL's "prompt_mean".

        sum_i (sum_t x_it / prompt_tokens_i) / num_prompts

    `prompt_tokens_i` counts the unmasked tokens of all rollouts of row i's prompt; pass those of the whole
    batch where a prompt's rollouts may be in several parts of it. A prompt without an unmasked token counts
    as a prompt, as in SkyRL.
    """
    prompts = grouped(group_ids, None)
    if prompt_tokens is None:
        prompt_tokens = prompts.rows(prompts.sum(mask.sum(-1).flatten()))
    if num_prompts is None:
        num_prompts = (prompts.sum(torch.ones_like(group_ids)) > 0).sum()
    per_row = masked_sum(at_least_float32(token_loss), mask).flatten() / prompt_tokens.clamp(min=1)
    return per_row.sum() / _at_least_one(num_prompts)


def _sequence_mean(per_sequence: Tensor, mask: Mask, num_sequences: Count | None) -> Scalar:
    rows = mask.any(-1).sum() if num_sequences is None else num_sequences
    return per_sequence.sum() / _at_least_one(rows)


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
