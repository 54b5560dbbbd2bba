"""PPO with other bounds: ones of each token, of the log-probability, or ones that keep a gradient beyond.

Shapes and units: `parts.py`.
"""

import math

import torch

from composer_plugins.kernels.masking import (
    at_least_float32,
    bounded,
    keep,
    safe_exp,
    with_nan_gradient,
    with_nan_of,
)
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["ce_gppo", "cpgd", "dcpo"]


def ce_gppo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta_low: float = 0.75,
    beta_high: float = 1.0,
    dual_clip: float | None = None,
) -> TokenLoss:
    """CE-GPPO: a token beyond PPO's clip keeps a gradient, of the size that it has at the bound.

        x_t = -A w_t pi(y_t) / sg(pi(y_t)),   r_t = pi(y_t) / old(y_t)
        w_t = beta_low (1 - clip_low)    if A < 0 and r_t < 1 - clip_low
        w_t = beta_high (1 + clip_high)  if A > 0 and r_t > 1 + clip_high
        w_t = r_t                        otherwise

    A smaller beta_low holds the entropy up. Betas of 0 are PPO's gradient. `dual_clip` bounds the loss by
    -A dual_clip where A < 0, as in `ppo`. Denominator: "token-mean".
    Source: arXiv 2509.20712; Kwai-Klear/CE-GPPO verl/trainer/ppo/core_algos.py@10558fe
    compute_gppo_loss_general_beta, whose script for 7B has the betas that are the defaults here.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    r = safe_exp(log_r.detach())
    w = torch.where((a < 0) & (r < 1 - clip_low), beta_low * (1 - clip_low), r)
    w = torch.where((a > 0) & (r > 1 + clip_high), beta_high * (1 + clip_high), w)
    loss = -a * w * (1 + (log_r - log_r.detach()))
    if dual_clip is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
    metrics = clip_metrics(r, mask, 1 - clip_low, 1 + clip_high, a)
    return TokenLoss(keep(loss, mask), metrics | {"weight": Metric(w, mask)})


def dcpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    epsilon_low: float = 0.16,
    epsilon_high: float = 0.2,
    ratio_max: float = 10.0,
    dual_clip: float = 10.0,
) -> TokenLoss:
    """DCPO: PPO's clip with a range for each token, which is wider the less likely the token was.

        x_t = max(-A r_t, -A clip(r_t, low_t, high_t)),   r_t = pi(y_t) / q_t,   q_t = old(y_t)
        low_t = (1 + sqrt(max(1 - 4 epsilon_low / q_t, 0))) / 2
        high_t = min((1 + sqrt(1 + 4 epsilon_high / q_t)) / 2, ratio_max)

    These are the ratios with |r_t - 1| pi(y_t) <= epsilon. `dual_clip` bounds the loss by -A dual_clip where
    A < 0. Its advantage, smoothed over steps, is not here. Denominator: "seq-mean-token-mean"; the authors'
    sum of these means over responses ("only-token-mean") is it times the number of responses.
    Source: arXiv 2509.02333; lime-RL/DCPO verl/trainer/ppo/core_algos.py@01787b0 compute_policy_loss_dcpo,
    clip_type "dynamic", and README.md.
    """
    a = masked_advantages(advantages, mask)
    old = with_nan_of(old_logprobs, a)
    ratio = safe_exp(log_ratio(logprobs, old, mask))
    inverse = safe_exp(keep(-at_least_float32(old).detach(), mask))  # 1 / q_t
    low = (1 + (1 - 4 * epsilon_low * inverse).clamp(min=0).sqrt()) / 2
    high = ((1 + (1 + 4 * epsilon_high * inverse).sqrt()) / 2).clamp(max=ratio_max)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    loss = torch.where(a < 0, torch.minimum(loss, -a * dual_clip), loss)
    metrics = clip_metrics(ratio, mask, low, high, a)
    return TokenLoss(
        keep(loss, mask), metrics | {"clip_low": Metric(low, mask), "clip_high": Metric(high, mask)}
    )


def cpgd(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """CPGD's clipped policy gradient: PPO's clip on log pi, so that no weight is a ratio.

        x_t = -A min(log pi(y_t), log old(y_t) + log(1 + clip_high))   if A > 0
        x_t = -A max(log pi(y_t), log old(y_t) + log(1 - clip_low))    otherwise

    The gradient is that of REINFORCE within the clip. The policy drift of the paper is a KL to the old
    policy and a term of its own. Denominator: "seq-mean-token-mean".
    Source: arXiv 2505.12504; opendilab/LightRFT lightrft/models/loss.py@49e62cb PolicyLoss, use_cpg_loss.
    """
    a = masked_advantages(advantages, mask)
    old = with_nan_of(old_logprobs, a)
    d = log_ratio(logprobs, old, mask)
    limited = torch.where(
        a > 0, bounded(d, high=math.log1p(clip_high)), bounded(d, low=math.log1p(-clip_low))
    )
    log_pi = with_nan_gradient(limited) + keep(at_least_float32(old).detach(), mask)
    metrics = clip_metrics(safe_exp(d), mask, 1 - clip_low, 1 + clip_high, a)
    return TokenLoss(keep(-a * log_pi, mask), metrics)
