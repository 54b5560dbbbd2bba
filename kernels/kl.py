"""Schulman's estimators of KL(pi || ref) from sampled tokens, per token, in nats.

With d_t = log pi(y_t) - log ref(y_t) and y_t drawn from pi, the mean over tokens estimates the KL:

    k1 = d              unbiased, high variance, may be negative
    k2 = d^2 / 2        biased, low variance; its gradient is that of the true reverse KL
    k3 = exp(-d) + d-1  unbiased, low variance, never negative ("low_var_kl")

The gradient of the mean of k1 or k3 is not the gradient of the KL. `k1_plus` and `k3_plus` have the value
of k1 and k3 and the gradient of k2. `k1_corrected`, `k2_corrected` and `k3_corrected` weigh them by the
ratio to the policy that sampled.
Each is exactly 0 where `mask` is False and is *not* averaged: reduce with `aggregation.aggregate`.

Source: http://joschu.net/blog/kl-approx.html; verl 0.9.1 trainer/ppo/core_algos.py kl_penalty (which
clamps k3: d to +-20, then the value to +-10); TRL 1.16 grpo_trainer.py (no clamp).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import (
    at_least_float32,
    below_overflow,
    keep,
    safe_exp,
    with_nan_gradient,
)
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio
from composer_plugins.kernels.types import Mask, Tokens


def k1(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    """log pi - log ref. Its gradient does not depend on ref: use it in the reward, not in the loss."""
    return with_nan_gradient(log_ratio(logprobs, ref_logprobs, mask))


def k2(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    """(log pi - log ref)^2 / 2."""
    return log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3(
    logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tokens:
    """ref/pi - 1 - log(ref/pi). verl clamps with `log_ratio_clamp=20, value_clamp=10`; TRL does not clamp."""
    d = log_ratio(logprobs, ref_logprobs, mask, clamp=log_ratio_clamp)
    x = below_overflow(-d)  # in both terms, or beyond saturation the gradient would point away from ref
    return _limited(x.expm1() - x, value_clamp)


def k1_plus(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    """The value of k1 with the gradient of k2, which is the gradient of the KL (verl's "k1+")."""
    return _with_gradient_of_k2(k1(logprobs, ref_logprobs, mask), logprobs, ref_logprobs, mask)


def k3_plus(
    logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tokens:
    """The value of k3 with the gradient of k2 (verl's "k3+"); a clamp flattens the value alone."""
    value = k3(logprobs, ref_logprobs, mask, log_ratio_clamp=log_ratio_clamp, value_clamp=value_clamp)
    return _with_gradient_of_k2(value, logprobs, ref_logprobs, mask)


def absolute(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    """|log pi - log ref|: no estimate of the KL, but a penalty of constant slope (verl's "abs")."""
    return with_nan_gradient(log_ratio(logprobs, ref_logprobs, mask).abs())


def squared(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    """(log pi - log ref)^2, twice k2: Kimi K2.5's regulariser, and PRIME-RL's with the rollout as ref.

    Source: arXiv 2602.02276 equation 1; PRIME-RL@559b447 src/prime_rl/trainer/rl/loss.py.
    """
    return log_ratio(logprobs, ref_logprobs, mask).square()


def k1_corrected(
    logprobs: Tokens,
    old_logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tokens:
    """r k1 with r = pi / old, both with their gradient: off-policy, this is the gradient of the KL.

    Clamps as in `k3_corrected`.
    Source: arXiv 2506.09477; NVIDIA-NeMo/RL nemo_rl/algorithms/utils.py@7ea279a calculate_kl (k1, k2, k3,
    with the policy itself as old unless use_on_policy_kl_approximation is set); THUDM/slime
    slime/utils/ppo_utils.py@624b824 compute_approx_kl (use_unbiased_kl).
    """
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask))
    value = with_nan_gradient(log_ratio(logprobs, ref_logprobs, mask, clamp=log_ratio_clamp))
    ratio = _without_gradient_beyond(log_ratio_clamp, ratio, logprobs, ref_logprobs, mask)
    return _limited(keep(ratio * value, mask), value_clamp)


def k2_corrected(
    logprobs: Tokens,
    old_logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tokens:
    """r k2 with r = pi / old, both with their gradient. Clamps as in `k3_corrected`.

    Source: as `k1_corrected`.
    """
    ratio = safe_exp(log_ratio(logprobs, old_logprobs, mask))
    value = log_ratio(logprobs, ref_logprobs, mask, clamp=log_ratio_clamp).square() / 2
    ratio = _without_gradient_beyond(log_ratio_clamp, ratio, logprobs, ref_logprobs, mask)
    return _limited(keep(ratio * value, mask), value_clamp)


def k3_corrected(
    logprobs: Tokens,
    old_logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
    *,
    level: Literal["token", "sequence"] = "token",
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Tokens:
    """r k3 with r = pi / old, both with their gradient: off-policy, this is the gradient of the KL.

    At `level="sequence"` r is the geometric mean over the row, as in GSPO (TRL's
    importance_sampling_level). `log_ratio_clamp` limits log pi - log ref, and where it does r has no gradient
    either; `value_clamp` limits the product. NeMo-RL: 20.0 and 10.0.
    Source: arXiv 2512.02556 (DeepSeek-V3.2) section 3.1; TRL 1.16 grpo_trainer.py use_bias_correction_kl;
    as `k1_corrected`.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    if level == "sequence":
        log_r = sequence_log_ratio(log_r, mask)
    elif level != "token":
        raise ValueError(f"level is {level!r}; known: 'token', 'sequence'")
    value = k3(logprobs, ref_logprobs, mask, log_ratio_clamp=log_ratio_clamp)
    ratio = _without_gradient_beyond(log_ratio_clamp, safe_exp(log_r), logprobs, ref_logprobs, mask)
    return _limited(keep(ratio * value, mask), value_clamp)


def subtract_kl(
    token_rewards: Tokens, logprobs: Tokens, ref_logprobs: Tokens, mask: Mask, *, kl_weight: float
) -> Tokens:
    """r_t - kl_weight (log pi - log ref), detached: the KL penalty in the reward, as in RLHF's PPO.

    `logprobs` are those of the policy that sampled. The result is the input of an advantage estimator.
    Source: arXiv 2203.02155; verl 0.9.1 core_algos.py compute_rewards (kl_ratio).
    """
    rewards = keep(at_least_float32(token_rewards), mask)
    return (rewards - kl_weight * k1(logprobs, ref_logprobs, mask)).detach()


def _with_gradient_of_k2(value: Tokens, logprobs: Tokens, ref_logprobs: Tokens, mask: Mask) -> Tokens:
    gradient = k2(logprobs, ref_logprobs, mask)
    return value.detach() + (gradient - gradient.detach())


def _limited(value: Tokens, clamp: float | None) -> Tokens:
    return value if clamp is None else torch.clamp(value, -clamp, clamp)


def _without_gradient_beyond(
    clamp: float | None,
    ratio: Float[Tensor, "*batch #tokens"],
    logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask,
) -> Float[Tensor, "*batch #tokens"]:
    """The ratio, detached at the tokens at which the clamp limits the log ratio to the reference."""
    if clamp is None:
        return ratio
    beyond = log_ratio(logprobs, ref_logprobs, mask).detach().abs() > clamp
    return torch.where(beyond, ratio.detach(), ratio)
