"""PPO's clip with another weight, by the sign of the advantage or by what follows a token.

Shapes and units: `parts.py`. The weight has no gradient of its own.
"""

import torch

from composer_plugins.kernels.advantages.scans import reverse_scan
from composer_plugins.kernels.masking import at_most, keep, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["aspo", "fipo", "up_grpo"]

# FIPO's bounds on the weight of a token with A < 0 and a ratio above `safety` (ms-swift).
SAFE_LOW, SAFE_HIGH = 0.8, 1.0


def fipo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float | None = None,
    half_life: float = 32.0,
    weight_low: float = 1.0,
    weight_high: float = 1.2,
    safety: float = 4.0,
) -> TokenLoss:
    """FIPO: each token's loss is weighted by how the update has moved the tokens that follow it.

        x_t = sg(f_t) max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)),   r_t = pi(y_t) / old(y_t)
        f_t = clip(exp(F_t), weight_low, weight_high),   F_t = sum_{k >= t} 2^(-(k - t) / half_life) log r_k

    F_t is the future KL, discounted by the distance in positions. Where A < 0 and r_t > `safety`, f_t is
    clipped to [0.8, 1] too. With `ratio_cap` a token with a larger ratio does not enter F_t, and r_t is
    capped in the unclipped branch (the authors' script for 32B: 10).
    Denominator: "token-mean" of the global batch.
    Source: arXiv 2603.19835, as documented in and read from ms-swift 4.6.0 swift/rlhf_trainers/
    grpo_trainer.py _compute_fipo_influence, whose defaults are those here.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    ratio = safe_exp(log_r)
    shift = log_r.detach()
    if ratio_cap is not None:
        shift = torch.where(ratio.detach() > ratio_cap, 0.0, shift)
    decay = torch.full_like(shift, 2 ** (-1 / half_life))
    f = safe_exp(keep(reverse_scan(shift, decay), mask))
    f = f.clamp(weight_low, weight_high)
    f = torch.where((a < 0) & (ratio.detach() > safety), f.clamp(SAFE_LOW, SAFE_HIGH), f)
    loss = torch.maximum(-a * at_most(ratio, ratio_cap), -a * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, a)
    return TokenLoss(keep(f * loss, mask), metrics | {"weight": Metric(f, mask)})


def aspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """ASPO: the ratio is turned over where A > 0, so that tokens which lag behind get the larger weight.

        x_t = -A w_t,   with the gradient -A w_t in log pi(y_t),   r_t = pi(y_t) / old(y_t)
        w_t = min(1 / r_t, dual_clip)  if A > 0,   min(r_t, dual_clip)  otherwise

    PPO's clip applies first: where A > 0 and r_t > 1 + clip_high, or A <= 0 and r_t < 1 - clip_low, the
    token has no gradient. The dual clip bounds the weight and keeps its gradient.
    Denominator: "token-mean". Departs from the authors: (1) the value of a token at the dual clip is
    -A dual_clip, theirs -A dual_clip log pi(y_t), with the same gradient; (2) they have other clips for
    tokens of high entropy.
    Source: arXiv 2510.06062; wizard-III/Archer2.0 verl/trainer/ppo/core_algos.py@b08d963
    compute_policy_loss_archer.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    r = log_r.detach()
    ratio, flipped = safe_exp(r), safe_exp(-r)
    good = a > 0
    outside = torch.where(good, ratio > 1 + clip_high, ratio < 1 - clip_low)
    value = torch.where(good, flipped.clamp(min=1 / (1 + clip_high)), ratio.clamp(min=1 - clip_low))
    value = value.clamp(max=dual_clip)
    slope = torch.where(outside, 0.0, value)
    loss = -a * (value + slope * (log_r - r))
    metrics = clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, a)
    return TokenLoss(keep(loss, mask), metrics | {"weight": Metric(value, mask)})


def up_grpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """UP-GRPO: REINFORCE without ratio or clip where A > 0, PPO's clip and dual clip elsewhere.

        x_t = -A pi(y_t) / sg(pi(y_t))                                 if A > 0
        x_t = min(max(-A r_t, -A (1 - clip_low)), -A dual_clip)   otherwise,   r_t = pi(y_t) / old(y_t)

    The value is -A where A > 0, whatever the old policy. PPO's upper clip never acts where A <= 0.
    Denominator: as `grpo`.
    Source: arXiv 2607.06987 eq. 15, as described by its authors in verl-project/verl#7022 (mode `up`).
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    ratio = safe_exp(log_r)
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(min=1 - clip_low))
    clipped = torch.minimum(clipped, -a * dual_clip)
    loss = torch.where(a > 0, -a * (1 + (log_r - log_r.detach())), clipped)
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, 1 - clip_low, torch.inf, a))
