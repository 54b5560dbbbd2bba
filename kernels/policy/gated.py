"""Policy losses with a gate on a whole response: how far the policy is from the rollouts', on average.

Shapes and units: `parts.py`.
"""

import torch

from composer_plugins.kernels.masking import keep, masked_mean, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.policy.region_parts import detached
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import binary_kl
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["flash_reinforce", "tvpo"]


def flash_reinforce(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    delta: float,
) -> TokenLoss:
    """FlashREINFORCE: importance-weighted REINFORCE on the responses that are near the rollout policy.

        x_t = -M A r_t,   r_t = pi(y_t) / rollout(y_t)
        M = mean_t KL(Bernoulli(q_t) || Bernoulli(p_t)) <= delta,   p_t = pi(y_t),  q_t = rollout(y_t)

    A response is dropped whole. The KL is in nats per token, and delta has no published default.
    For one rollout per prompt: the advantage is the reward less the mean of the batch.
    Denominator: "seq-mean-token-mean". In OpenRLHF r_t has the old policy's probability, which is pi's at
    the one step of a batch; at further steps PPO's clip acts there.
    Departs from OpenRLHF: (1) probabilities are not clamped to [1e-6, 1 - 1e-6]: a KL of 0 log 0 is 0;
    (2) a KL that rounding makes negative counts as near (OpenRLHF#1354).
    Source: OpenRLHF 0.11.2 openrlhf/models/loss.py PolicyLoss, is_correction_gating "binary_kl" at level
    "seq"; OpenRLHF/OpenRLHF#1339. The paper is on ResearchGate, and was not read.
    """
    a = masked_advantages(advantages, mask)
    ratio = safe_exp(log_ratio(logprobs, with_nan_of(rollout_logprobs, a), mask))
    p, q = keep(detached(logprobs), mask), keep(detached(rollout_logprobs), mask)
    distance = masked_mean(binary_kl(p, q), mask, keepdim=True).expand(mask.shape)
    far = with_nan_of(distance, a) > delta  # False of a NaN, so that no gate hides it
    metrics = {
        "ratio": Metric(ratio.detach(), mask),
        "binary_kl": Metric(distance, mask),
        "mask_frac_sequence": Metric(far, mask),
    }
    return TokenLoss(keep(-a * ratio, mask & ~far), metrics)


def tvpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    threshold: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weight_cap: float = 2.0,
) -> TokenLoss:
    """TVPO: of a response that is far from the rollout policy, the tokens that would go further are dropped.

        x_t = min(rho_t, weight_cap) M_t max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high))
        M_t = 0  if mean_u |rho_u - 1| > threshold and A log rho_t > 0,   1 otherwise
        r_t = pi(y_t) / old(y_t),   rho_t = old(y_t) / rollout(y_t)

    mean_u |rho_u - 1| estimates twice the total variation between old and rollout policy. `weight_cap` is
    truncated importance sampling. The threshold is not published.
    Denominator: "token-mean". Departs from open-instruct: (1) there log rho_t is clamped to +-10 nats.
    Source: arXiv 2603.01365 (VACO) for the rule, which open-instruct adapts to language models:
    allenai/open-instruct open_instruct/grpo_utils.py@e6c3044 compute_rho_correction, rho_mask_tv_divergence.
    """
    a = masked_advantages(advantages, mask)
    log_rho = log_ratio(old_logprobs, rollout_logprobs, mask).detach()
    rho = safe_exp(log_rho)
    log_r = log_ratio(logprobs, with_nan_of(with_nan_of(old_logprobs, a), log_rho), mask)
    ratio = safe_exp(log_r)
    variation = masked_mean((rho - 1).abs(), mask, keepdim=True)
    dropped = (variation > threshold) & (a * log_rho > 0) & ~log_r.isnan()  # no gate hides a NaN
    weight = rho.clamp(max=weight_cap)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high))
    metrics = clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, a) | {
        "variation": Metric(variation.expand(mask.shape), mask),
        "mask_frac": Metric(dropped & mask, mask),
    }
    return TokenLoss(keep(weight * loss, mask & ~dropped), metrics)
