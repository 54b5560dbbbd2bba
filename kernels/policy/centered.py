"""Score centering: the update that the rollout policy expects at a token is subtracted."""

import torch

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.policy.parts import token_advantages
from composer_plugins.kernels.policy.region_parts import detached
from composer_plugins.kernels.policy.regions import ipo
from composer_plugins.kernels.types import Advantages, LogProbs, Mask, TokenLoss, Tokens

__all__ = ["ipo_centered"]


def ipo_centered(
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    support_logprobs: LogProbs,
    rollout_support_logprobs: LogProbs,
    *,
    tv_low: float = 0.3,
    tv_high: float = 0.3,
    ratio_cap: float | None = 1e4,
    adv_tau: float = 1.0,
    kl_tau: float = 0.0,
) -> TokenLoss:
    """Score centering on `ipo`: every token's update, less the update that the rollout policy expects there.

        x_t = ipo's x_t + adv_tau A sum_v sg(q_v min(p_v / q_v, ratio_cap) M_v) log p_v
        M_v = -tv_low <= p_v - q_v <= tv_high

    v are the entries that the rollout policy could sample, and p, q are normalised over them. A rollout
    log-probability of -inf marks padding. The sum counts at every unmasked token, also where M_t = 0.
    Denominator: "token-mean" of the global batch. Gradients flow into `support_logprobs` too.
    Source: arXiv 2609.20807; PRIME-RL src/prime_rl/trainer/rl/loss.py, after 559b447, IPOLoss.
    """
    token = ipo(
        logprobs,
        rollout_logprobs,
        advantages,
        mask,
        tv_low=tv_low,
        tv_high=tv_high,
        ratio_cap=ratio_cap,
        adv_tau=adv_tau,
        kl_tau=kl_tau,
    )
    valid = mask.unsqueeze(-1) & (rollout_support_logprobs != -torch.inf)
    log_p = keep(at_least_float32(support_logprobs), valid)
    p, q = log_p.detach().exp(), keep(detached(rollout_support_logprobs), valid).exp()
    outside = (p - q < -tv_low) | (p - q > tv_high)
    weight = p if ratio_cap is None else torch.minimum(p, ratio_cap * q)
    expected = (keep(weight * ~outside, valid) * log_p).sum(-1)
    return TokenLoss(token.loss + adv_tau * token_advantages(advantages, mask) * expected, token.metrics)
