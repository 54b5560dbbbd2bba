"""Schulman's estimators of KL(pi || ref) from sampled tokens, per token, in nats.

With d_t = log pi(y_t) - log ref(y_t) and y_t drawn from pi, the mean over tokens estimates the KL:

    k1 = d              unbiased, high variance, may be negative
    k2 = d^2 / 2        biased, low variance; its gradient is that of the true reverse KL
    k3 = exp(-d) + d-1  unbiased, low variance, never negative ("low_var_kl")

Each is exactly 0 where `mask` is False and is *not* averaged: reduce with `aggregation.aggregate`.
Kimi's and PRIME-RL's regulariser is tau * d^2, twice k2.

Source: http://joschu.net/blog/kl-approx.html; verl 0.9.1 trainer/ppo/core_algos.py kl_penalty (which
clamps k3: d to +-20, then the value to +-10); TRL 1.16 grpo_trainer.py (no clamp).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.masking import below_overflow
from composer_plugins.kernels.ratios import log_ratio


def k1(
    logprobs: Float[Tensor, "*batch tokens"],
    ref_logprobs: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
) -> Float[Tensor, "*batch tokens"]:
    """log pi - log ref. Its gradient does not depend on ref: use it in the reward, not in the loss."""
    return log_ratio(logprobs, ref_logprobs, mask)


def k2(
    logprobs: Float[Tensor, "*batch tokens"],
    ref_logprobs: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
) -> Float[Tensor, "*batch tokens"]:
    """(log pi - log ref)^2 / 2."""
    return log_ratio(logprobs, ref_logprobs, mask).square() / 2


def k3(
    logprobs: Float[Tensor, "*batch tokens"],
    ref_logprobs: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
    *,
    log_ratio_clamp: float | None = None,
    value_clamp: float | None = None,
) -> Float[Tensor, "*batch tokens"]:
    """ref/pi - 1 - log(ref/pi). verl's is `log_ratio_clamp=20, value_clamp=10`; TRL's has neither."""
    d = log_ratio(logprobs, ref_logprobs, mask, clamp=log_ratio_clamp)
    x = below_overflow(-d)  # both terms: exp alone would leave the gradient of d, away from ref
    value = x.expm1() - x
    return value if value_clamp is None else torch.clamp(value, -value_clamp, value_clamp)
