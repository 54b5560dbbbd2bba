"""Policy losses of score form: a detached weight times A log pi(y_t). Shapes and units: `parts.py`."""

import math

import torch

from composer_plugins.kernels.masking import at_least_float32, keep, masked_sum, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages, score, token_advantages
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.ratios import importance_weight, log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["cispo", "dro", "gpg", "importance_sampling", "reinforce", "rloo", "vespo"]

VESPO_CLAMP = 20.0  # nats, on the log ratio of a token and of a sequence (authors and TRL)
# VESPO takes w^k of no smaller a w than this (its authors and TRL), so that k alone cannot underflow it.
LOG_WEIGHT_MIN = math.log(1e-8)


def reinforce(logprobs: Tokens, advantages: Advantages, mask: Mask) -> TokenLoss:
    """REINFORCE: the score function, weighted by the advantage alone. On-policy only.

        x_t = -A log pi(y_t)

    RLOO is this with `advantages.rloo` (arXiv 2402.14740), REINFORCE++ with advantages of its own,
    GPG with `advantages.gpg`. Denominator: "token-mean"; RLOO "seq-mean-token-sum".
    Source: Williams 1992; verl 0.9.1 core_algos.py compute_policy_loss_gpg.
    """
    log_pi = keep(at_least_float32(logprobs), mask)
    return TokenLoss(token_advantages(-advantages, mask) * log_pi, {})


gpg = preset(
    reinforce,
    "gpg",
    """GPG is REINFORCE with `advantages.gpg`, which corrects for prompts without a signal.

        x_t = -A log pi(y_t)

    Denominator: "token-mean".
    Source: arXiv 2504.02546; verl 0.9.1 core_algos.py compute_policy_loss_gpg.
    """,
)
rloo = preset(
    reinforce,
    "rloo",
    """RLOO is REINFORCE with `advantages.rloo`, on whole completions.

        sum_t x_t = -A log pi(y)

    Denominator: "seq-mean-token-sum".
    Source: arXiv 2402.14740.
    """,
)


def importance_sampling(
    logprobs: Tokens, rollout_logprobs: Tokens, advantages: Advantages, mask: Mask
) -> TokenLoss:
    """Off-policy REINFORCE: the ratio to the policy that sampled, unbounded and with its gradient.

        x_t = -A r_t,   r_t = pi(y_t) / rollout(y_t)

    Denominator: "token-sum", as Tinker has it.
    Departs from Tinker: (1) a ratio saturates 10 nats below overflow.
    Source: tinker-docs.thinkingmachines.ai/losses, `importance_sampling`.
    """
    advantages = masked_advantages(advantages, mask)
    ratio = safe_exp(log_ratio(logprobs, with_nan_of(rollout_logprobs, advantages), mask))
    return TokenLoss(keep(-advantages * ratio, mask), {"ratio": Metric(ratio.detach(), mask)})


def cispo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float | None = None,
    clip_high: float = 0.2,
    log_ratio_clamp: float | None = None,
) -> TokenLoss:
    """CISPO: REINFORCE with a clipped, detached ratio as weight, so that no token loses its gradient.

        x_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A log pi(y_t)

    `clip_low=None` sets no lower bound, as the paper does in its experiments.
    Denominator: "token-mean". Departures: (1) TRL's `epsilon_high` is the cap itself, not 1 + eps:
    TRL's e is `clip_high = e - 1`; (2) verl clamps the log ratio: `log_ratio_clamp=20.0`.
    Source: arXiv 2506.13585 eq. 4-5; verl 0.9.1 compute_policy_loss_cispo; TRL 1.16 grpo_trainer.py.
    """
    ratio = importance_weight(logprobs, old_logprobs, clamp=log_ratio_clamp)
    low, high = 0.0 if clip_low is None else 1 - clip_low, 1 + clip_high
    weight = ratio.clamp(low, high)
    return TokenLoss(score(weight, advantages, logprobs, mask), clip_metrics(ratio, mask, low, high))


def vespo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    log_weights: Tokens | None = None,
) -> TokenLoss:
    """VESPO: a gamma-shaped, detached weight of the whole sequence's ratio, which is a product.

        w = prod_t r_t,   phi(w) = w^k exp(lambda (1 - w)),   x_t = -sg(phi(w)) A log pi(y_t)

    (k, lambda) is (k_pos, lambda_pos) where A >= 0 and (k_neg, lambda_neg) elsewhere; phi(1) = 1.
    `log_weights`, nats, are logs of rollout corrections (old over rollout) and enter w as factors:
    do not multiply the loss by them too.
    Denominator: "token-mean". log r_t, log_weights and log w are clamped to +-20 nats, w^k to w >= 1e-8.
    Departs from the authors: (1) NaN stays NaN, theirs becomes 0; (2) they take the sign of A
    from the first token. From TRL: (3) its w is at least 1e-8 everywhere; (4) it also multiplies in the
    corrections of masked tokens.
    Source: arXiv 2602.10693; FloyedShen/VESPO recipe/vespo/code/core_algos.py@aa1f304; TRL 1.16
    grpo_trainer.py get_gamma_weights.
    """
    log_r = log_ratio(logprobs.detach(), old_logprobs, mask, clamp=VESPO_CLAMP)
    if log_weights is not None:
        log_r = log_r + at_least_float32(log_weights).detach().clamp(-VESPO_CLAMP, VESPO_CLAMP)
    log_w = masked_sum(log_r, mask, keepdim=True).clamp(-VESPO_CLAMP, VESPO_CLAMP)
    w, floored = log_w.exp(), log_w.clamp(min=LOG_WEIGHT_MIN)
    log_phi_pos = k_pos * floored + lambda_pos * (1 - w)
    log_phi_neg = k_neg * floored + lambda_neg * (1 - w)
    phi = safe_exp(torch.where(masked_advantages(advantages, mask) >= 0, log_phi_pos, log_phi_neg))
    metrics = {
        "ratio": Metric(w.expand(mask.shape), mask),
        "weight": Metric(phi.expand(mask.shape), mask),
    }
    return TokenLoss(score(phi, advantages, logprobs, mask), metrics)


def dro(
    logprobs: Tokens, old_logprobs: Tokens, advantages: Advantages, mask: Mask, *, beta: float
) -> TokenLoss:
    """DRO: REINFORCE with a squared log-ratio to the old policy as penalty, and no ratio.

        x_t = -A log pi(y_t) + (beta / 2) (log r_t)^2

    `beta` has no default: verl's `dro_beta` has none either.
    Denominator: "token-mean". Departs from the paper: (1) A takes the place of its r - V(x), per token.
    Source: arXiv 2405.19107; verl 0.9.1 core_algos.py compute_policy_loss_dro.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    loss = score(1.0, advantages, logprobs, mask) + 0.5 * beta * log_r.square()
    return TokenLoss(loss, {"log_ratio": Metric(log_r.detach(), mask)})
