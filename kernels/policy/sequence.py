"""Policy losses with one ratio per sequence: GSPO and its relatives. Shapes and units: `parts.py`."""

import torch

from composer_plugins.kernels.masking import at_least_float32, at_most, bounded, keep, safe_exp, with_nan_of
from composer_plugins.kernels.policy.parts import clip_metrics, masked_advantages
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio, with_token_gradient
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["gmpo", "gspo", "gspo_token", "luspo"]


def gspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """GSPO: one ratio per sequence, clipped as PPO clips a token's.

        s = exp(mean_t log r_t);   x_t = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) for every t

    Advantages are per sequence ([B, 1]). Every unmasked token of a row has the same loss,
    so "seq-mean-token-mean" gives the paper's mean over sequences. `ratio_cap` is TRL's `delta`.
    Source: arXiv 2507.18071 eq. 5; TRL 1.16 `importance_sampling_level="sequence"`.
    """
    advantages = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, advantages), mask)
    ratio = safe_exp(sequence_log_ratio(log_r, mask))
    unclipped = -advantages * at_most(ratio, ratio_cap)
    loss = torch.maximum(unclipped, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, advantages))


def gspo_token(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_cap: float | None = None,
) -> TokenLoss:
    """GSPO-token: the sequence's ratio in value, each token's own gradient; A may differ by token.

        log s_t = sg(log s) + log pi(y_t) - sg(log pi(y_t)),   then as GSPO

    verl's `gspo` is this with `log_ratio_cap=10.0`.
    Source: arXiv 2507.18071 eq. 13-14; verl 0.9.1 core_algos.py compute_policy_loss_gspo.
    """
    advantages = masked_advantages(advantages, mask)
    sequence = sequence_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask)
    ratio = with_token_gradient(sequence, keep(at_least_float32(logprobs), mask), cap=log_ratio_cap)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    return TokenLoss(keep(loss, mask), clip_metrics(ratio, mask, 1 - clip_low, 1 + clip_high, advantages))


luspo = preset(
    gspo,
    "luspo",
    """LUSPO is GSPO with each sequence's loss times its length, so that length is not penalised.

        sum_t x_t = |y| max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)),   s as in `gspo`

    Per token this is `gspo`: the factor |y| is the sum over tokens of its denominator,
    "seq-mean-token-sum".
    Departs from TRL: (1) its `loss_type="luspo"` keeps one ratio per token unless
    `importance_sampling_level="sequence"`; that is `ppo` with this denominator.
    Source: arXiv 2602.05261; TRL 1.16 grpo_trainer.py _compute_loss.
    """,
    clip_low=2e-3,
    clip_high=2.5e-3,
)


def gmpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """GMPO: the geometric mean of ratios that were clipped one by one, in log space.

        z_t = min(log r_t, clip_high) if A > 0, max(log r_t, -clip_low) otherwise
        x_t = -A exp(mean_t z_t) for every t

    The clips are in nats: 0.4 bounds a ratio by exp(0.4), where PPO's 0.2 would mean exp(0.2).
    Advantages are per sequence. Denominator: "seq-mean-token-mean".
    Departs from verl: (1) verl divides by |y| + 1e-8 (rounded away unless its mask is float64), (2) its
    `clip_ratio` defaults to PPO's 0.2, (3) its mean counts rows without an unmasked token. From TRL:
    (4) a row without an unmasked token has the ratio 1 there, -A in the value. From the authors: (5) they
    round the clip to float32.
    Source: arXiv 2507.20673; callsys/GMPO train_zero_math_gmpo.py@205b2bf; verl 0.9.1
    compute_policy_loss_geo_mean; TRL 1.16 experimental/gmpo.
    """
    advantages = masked_advantages(advantages, mask)
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, advantages), mask)
    z = torch.where(advantages > 0, bounded(log_r, high=clip_high), bounded(log_r, low=-clip_low))
    ratio = safe_exp(sequence_log_ratio(z, mask))
    d = log_r.detach()
    metrics = {
        "ratio": Metric(ratio.detach().expand(mask.shape), mask),
        "clip_frac_low": Metric((d < -clip_low) & (advantages < 0), mask),
        "clip_frac_high": Metric((d > clip_high) & (advantages > 0), mask),
    }
    return TokenLoss(keep(-advantages * ratio, mask), metrics)
