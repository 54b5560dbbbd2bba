"""Policy losses for old data: REINFORCE whose weight is capped, tapered or cut off by the ratio.

Shapes and units: `parts.py`. None of them multiplies a positive advantage by a ratio above 1.
"""

import math
from typing import Literal

import torch

from composer_plugins.kernels.masking import (
    at_least_float32,
    bounded,
    keep,
    masked_sum,
    safe_exp,
    with_nan_gradient,
    with_nan_of,
)
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages, score, token_advantages
from composer_plugins.kernels.ratios import importance_weight, log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["luffy", "opmd", "rec", "sppo", "topr"]

Level = Literal["token", "sequence"]
Clip = Literal["none", "one-side", "two-side", "ring"]
Weight = Literal["none", "ratio"]


def topr(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    level: Level = "sequence",
) -> TokenLoss:
    """Tapered off-policy REINFORCE: a bad response counts less, the less likely the policy finds it.

        x_t = -sg(alpha) A log pi(y_t)
        alpha = 1  if A > 0,   min(prod_u r_u, 1)  otherwise;   r_t = pi(y_t) / old(y_t)

    With level "token" alpha is min(r_t, 1), as ROLL and Trinity have it. The paper has the reward in the
    place of A, and its baseline shifts the reward. Denominator: "seq-mean-token-sum".
    Raises ValueError for an unknown level.
    Source: arXiv 2503.14286 eq. 8; Trinity-RFT 0.6.0 topr_policy_loss.py; alibaba/ROLL
    roll/pipeline/rlvr/actor_pg_worker.py@8eb27cc _compute_topr_loss.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask).detach()
    if level == "sequence":
        log_r = masked_sum(log_r, mask, keepdim=True)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known: {', '.join(Level.__args__)}")
    taper = log_r.clamp(max=0).exp()
    good = with_nan_of(torch.ones_like(taper), taper)  # NaN where the ratio is
    alpha = torch.where(masked_advantages(advantages, mask) > 0, good, taper).expand(mask.shape)
    return TokenLoss(score(alpha, advantages, logprobs, mask), {"weight": Metric(alpha, mask)})


def rec(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip: Clip = "one-side",
    weight: Weight = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    outer_low: float = 0.6,
    outer_high: float = 2.0,
) -> TokenLoss:
    """REC: REINFORCE without importance weights, in which PPO's clip is a mask alone.

        x_t = -sg(w_t M_t) A log pi(y_t),   r_t = pi(y_t) / old(y_t)
        w_t = 1,   or r_t with weight "ratio"
        one-side   M_t = r_t <= 1 + clip_high  if A >= 0,   r_t >= 1 - clip_low  otherwise
        two-side   M_t = 1 - clip_low <= r_t <= 1 + clip_high
        ring       M_t = two-side,  or r_t <= 1 - outer_low if A >= 0,  or r_t >= 1 + outer_high if A < 0
        none       M_t = 1

    One-side with the ratio as weight has PPO's gradient. Two-side without it is the masked REINFORCE of
    REC-TwoSide, and "none" is `reinforce` on old data. Denominator: "token-mean".
    Raises ValueError for an unknown clip or weight.
    Source: arXiv 2509.24203; Trinity-RFT 0.6.0 rec_policy_loss.py, whose regularizer is a term of its own.
    """
    ratio = importance_weight(logprobs, old_logprobs)
    a = masked_advantages(advantages, mask)
    below, above = ratio < 1 - clip_low, ratio > 1 + clip_high
    if clip == "one-side":
        outside = torch.where(a >= 0, above, below)
    elif clip == "two-side":
        outside = below | above
    elif clip == "ring":
        ring = torch.where(a >= 0, ratio <= 1 - outer_low, ratio >= 1 + outer_high)
        outside = (below | above) & ~ring
    elif clip == "none":
        outside = torch.zeros_like(mask)
    else:
        raise ValueError(f"unknown clip {clip!r}; known: {', '.join(Clip.__args__)}")
    if weight == "none":
        w = with_nan_of(torch.ones_like(ratio), ratio)  # NaN where the ratio is
    elif weight == "ratio":
        w = ratio
    else:
        raise ValueError(f"unknown weight {weight!r}; known: {', '.join(Weight.__args__)}")
    metrics = {
        "ratio": Metric(ratio, mask),
        "mask_frac_low": Metric(outside & (ratio < 1), mask),
        "mask_frac_high": Metric(outside & (ratio > 1), mask),
    }
    return TokenLoss(score(w * ~outside, advantages, logprobs, mask), metrics)


def opmd(logprobs: Tokens, advantages: Advantages, mask: Mask, *, tau: float = 1.0) -> TokenLoss:
    """Online policy mirror descent as Trinity has it: REINFORCE, with a smaller step for a larger tau.

        x_t = -A log pi(y_t) / (1 + tau)

    The regulariser towards the old policy is in the factor, so there is no ratio. The paper's whole
    objective, with the square of the log ratio, is `kimi_k15`.
    Advantages: reward less the mean of its group, `advantages.dr_grpo`. Denominator: "token-mean".
    Source: Trinity-RFT 0.6.0 (arXiv 2505.17826) trinity/algorithm/policy_loss_fn/opmd_policy_loss.py.
    """
    log_pi = keep(at_least_float32(logprobs), mask)
    return TokenLoss(token_advantages(-advantages, mask) * log_pi / (1 + tau), {})


def sppo(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Advantages, mask: Mask, *, epsilon: float = 0.3
) -> TokenLoss:
    """Softmax PPO: the log ratio in the place of the ratio, clipped whatever the sign of the advantage.

        x_t = -A log clip(r_t, 1 / (1 + epsilon), 1 + epsilon),   r_t = pi(y_t) / old(y_t)

    Not the preference loss of that name (self-play preference optimization). Denominator: "token-mean".
    Departs from Trinity: (1) there the value of a clipped token is 0; the gradient is 0 in both.
    Source: arXiv 2108.05828; Trinity-RFT 0.6.0 trinity/algorithm/policy_loss_fn/sppo_loss_fn.py.
    """
    a = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, a), mask)
    limit = math.log1p(epsilon)
    metrics = clip_metrics(safe_exp(log_r), mask, 1 / (1 + epsilon), 1 + epsilon)
    clipped = with_nan_gradient(bounded(log_r, -limit, limit))
    return TokenLoss(keep(-a * clipped, mask), metrics)


def luffy(logprobs: Tokens, advantages: Advantages, mask: Mask, *, gamma: float = 0.1) -> TokenLoss:
    """LUFFY's term for responses that another policy wrote: its shaped probability takes the ratio's place.

        x_t = -A f(pi(y_t)),   f(p) = p / (p + gamma)

    The gradient in log pi is -A gamma p / (p + gamma)^2, which is largest at p = gamma. So tokens
    that the policy finds unlikely are learned from, too. The policy that wrote them need not be known.
    Mask the policy's own rollouts out here, and train them by `grpo`: LUFFY is the sum of both.
    Advantages: of groups that hold both sorts of responses. Denominator: "token-mean".
    Source: arXiv 2504.14945; ElliottYan/LUFFY luffy/verl/verl/mix_src/mix_core_alg.py@01f4ae0
    compute_token_on_off_policy_loss, with off_policy_reshape p_div_p_0.1 as in its scripts.
    """
    p = keep(at_least_float32(logprobs), mask).exp()
    loss = -masked_advantages(advantages, mask) * p / (p + gamma)
    return TokenLoss(keep(loss, mask), {"probability": Metric(p.detach(), mask)})
