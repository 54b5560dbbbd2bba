"""Policy losses with a gate on a response, whole or so far: how much the policy differs from the rollout's.

Shapes and units: `parts.py`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import keep, masked_mean, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.policy.region_parts import by_sign, detached, masked_surrogate
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.trust_regions import binary_kl
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["cppo", "flash_reinforce", "tvpo"]


def cppo(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    tv_max: float = 0.15,
    weight_min: float = 0.8,
    budget: float = 0.02,
    budget_factor: float = 2.0,
    quantile: float = 0.9,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """CPPO: DPPO with less room for early tokens, and for a token whose prefix has moved far already.

        x_t = -sg(min(r_t, ratio_cap) M_t) A log pi(y_t),   r_t = p_t / q_t,   D_t = |p_t - q_t|
        M_t = A (r_t - 1) <= 0  or  w_t D_t <= tv_max + min(0, b sum_{u < t} w_u - sum_{u < t} w_u D_u)
        w_t = 1 - (1 - weight_min) (t - 1) / (|y| - 1)
        b = clip(the quantile of D over the response, budget, budget_factor budget)

    p_t = pi(y_t), q_t = rollout(y_t), and t counts the unmasked tokens of the response from 1.
    Denominator: "seq-mean-token-mean". The authors' implementation has a budget_factor of 5, and takes the
    padded width for |y|.
    Source: arXiv 2606.10968 eq. 8-10 and 22, algorithm 1, as stated in the tests and the description of
    verl-project/verl#6731 (loss_mode cppo, not merged).
    """
    p, q = keep(detached(logprobs), mask).exp(), keep(detached(rollout_logprobs), mask).exp()
    distance = (p - q).abs()
    t, n = mask.cumsum(-1), mask.sum(-1, keepdim=True)
    w = 1 - (1 - weight_min) * (t - 1).clamp(min=0) / (n - 1).clamp(min=1)
    w = keep(w.to(distance.dtype), mask)
    moved = w * distance
    b = _quantile(distance, mask, quantile).clamp(budget, budget_factor * budget)
    spent = (moved.cumsum(-1) - moved) - b * (w.cumsum(-1) - w)  # of the tokens before this one
    away = advantages * (p - q) > 0
    outside = away & (moved > tv_max - spent.clamp(min=0))  # False of a NaN, so that no gate hides it
    region = by_sign(~outside, advantages, distance.isnan())
    return masked_surrogate(logprobs, rollout_logprobs, advantages, mask, region, ratio_cap=ratio_cap)


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


def _quantile(x: Tokens, mask: Mask, share: float) -> Float[Tensor, "*batch 1"]:
    """The quantile of the unmasked numbers of each row, interpolated, of probabilities; 0 of an empty row."""
    ordered = torch.where(mask, x, 2.0).sort(-1).values
    ordered = torch.nn.functional.pad(ordered, (0, 1))  # a row without tokens has a place to look at
    place = (mask.sum(-1, keepdim=True) - 1).clamp(min=0).to(x.dtype) * share
    low = place.floor()
    below, above = (ordered.gather(-1, i.long()) for i in (low, place.ceil()))
    found = below + (place - low) * (above - below)
    return torch.where(mask.any(-1, keepdim=True), found, 0.0)
