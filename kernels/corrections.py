"""Weights between the old (trainer's) and the rollout (inference engine's) policy, per token.

The engine that samples computes other probabilities than the trainer, in other precision and often with
older weights. Such a weight w = old / rollout multiplies any token loss (`corrected`). It is detached, and
0 where the mask is False.

    level "token"       w_t = exp(d_t),         d_t = log old(y_t) - log rollout(y_t)
    level "sequence"    w = exp(sum_t d_t)      one per row: unbiased, of high variance
    level "geometric"   w = exp(mean_t d_t)     one per row, independent of length

With `normalise` weights are divided by their mean: over unmasked tokens, or with one weight per row over the
rows that have an unmasked token. The mean is that of the whole batch.
Raises ValueError for an unknown level, and for a lower bound above the upper one.
NaN in `rollout_logprobs` at an unmasked token gives NaN: mask tokens of unknown probability.
"""

from typing import Literal

import torch

from composer_plugins.kernels.masking import keep, masked_sum, safe_exp
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio
from composer_plugins.kernels.types import Mask, Metric, TokenLoss, Tokens

Level = Literal["token", "sequence", "geometric"]


def tis(
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Mask,
    *,
    cap: float = 2.0,
    floor: float | None = None,
    level: Level = "token",
    log_ratio_clamp: float | None = None,
    normalise: bool = False,
) -> Tokens:
    """Truncated importance sampling: min(w, cap), and at least `floor` where one is given.

    Source: https://fengyao.notion.site/off-policy-rl; verl 0.9.1 trainer/ppo/rollout_corr_helper.py
    compute_rollout_correction_weights; TRL 1.16 grpo_trainer.py vllm_importance_sampling_mode *_truncate.
    """
    _check_order("floor", floor, "cap", cap)
    w = _weights(old_logprobs, rollout_logprobs, mask, level, log_ratio_clamp)
    return _finished(w.clamp(min=floor, max=cap), mask, level, normalise)


def mis(
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Mask,
    *,
    high: float,
    low: float | None = None,
    level: Level = "sequence",
    log_ratio_clamp: float | None = None,
    normalise: bool = False,
) -> Tokens:
    """Masked importance sampling: w where low <= w <= high, 0 elsewhere; no `low` means no lower bound.

    Source: https://richardli.xyz/rl-collapse; TRL 1.16 grpo_trainer.py vllm_importance_sampling_mode
    *_mask; verl 0.9.1 rollout_corr_helper.py compute_rollout_correction_weights ("low_high").
    """
    _check_order("low", low, "high", high)
    w = _weights(old_logprobs, rollout_logprobs, mask, level, log_ratio_clamp)
    outside = w > high
    if low is not None:
        outside = outside | (w < low)
    return _finished(torch.where(outside, 0.0, w), mask, level, normalise)


icepop = preset(
    mis,
    "icepop",
    """IcePop: masked importance sampling per token, with a lower and an upper bound.

    The bounds are those of verl's preset. The paper's bounds could not be checked.
    Source: arXiv 2510.18855 (Ring-1T); verl 0.9.1 rollout_corr_helper.py ("low_high") and
    trainer/config/algorithm.py decoupled_token_icepop.
    """,
    without=("level",),
    level="token",
    low=0.5,
    high=5.0,
)


def seq_mask_tis(
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Mask,
    *,
    low: float,
    high: float,
    log_ratio_clamp: float | None = None,
    normalise: bool = False,
) -> Tokens:
    """The weight of each token in sequences whose geometric mean is in [low, high]; 0 elsewhere.

        w_t [low <= exp(mean_t d_t) <= high],   w_t = exp(d_t)

    Departs from NeMo-RL: (1) a weight saturates below overflow instead of becoming 0; (2) NaN stays NaN.
    Source: NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a ClippedPGLossFn
    ("seq-mask-tis", whose bounds in its comments are 0.999 and 1.002); https://richardli.xyz/rl-collapse.
    """
    _check_order("low", low, "high", high)
    mean = _weights(old_logprobs, rollout_logprobs, mask, "geometric", log_ratio_clamp)
    w = _weights(old_logprobs, rollout_logprobs, mask, "token", log_ratio_clamp)
    return _finished(torch.where((mean < low) | (mean > high), 0.0, w), mask, "token", normalise)


def corrected(token: TokenLoss, weights: Tokens, mask: Mask) -> TokenLoss:
    """A loss per token times its correction, with the metric "correction"."""
    loss = keep(token.loss * weights.detach(), mask)
    return TokenLoss(loss, {**token.metrics, "correction": Metric(weights.detach(), mask)})


def _check_order(lower: str, low: float | None, upper: str, high: float) -> None:
    if low is not None and low > high:
        raise ValueError(f"{lower} {low:g} is above {upper} {high:g}: no weight is between them")


def _weights(old: Tokens, rollout: Tokens, mask: Mask, level: Level, clamp: float | None) -> Tokens:
    log_w = log_ratio(old, rollout, mask).detach()
    if level == "sequence":
        log_w = masked_sum(log_w, mask, keepdim=True)
    elif level == "geometric":
        log_w = sequence_log_ratio(log_w, mask)
    elif level != "token":
        raise ValueError(f"level is {level!r}; known: 'token', 'sequence', 'geometric'")
    if clamp is not None:
        log_w = log_w.clamp(-clamp, clamp)
    return safe_exp(log_w).expand(mask.shape)


def _finished(w: Tokens, mask: Mask, level: Level, normalise: bool) -> Tokens:
    w = keep(w, mask)
    if not normalise:
        return w
    if level == "token":
        mean = w.sum() / mask.sum().clamp(min=1)
    else:
        mean = (w.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / mask.any(-1).sum().clamp(min=1)
    return torch.where(mean == 0, w, w / mean)
