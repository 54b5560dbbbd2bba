"""Policy losses with one ratio per sequence: GSPO and its relatives. Shapes and units: `parts.py`."""

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, keep, safe_exp
from composer_plugins.kernels.policy.parts import Advantages, Mask, Tokens, clipped, credit
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio, with_token_gradient
from composer_plugins.kernels.trust_regions import log_clip


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

    Advantages are per sequence ([B, 1]). The same loss stands at every live token, so
    "seq-mean-token-mean" gives the paper's mean over sequences. `ratio_cap` is TRL's `delta`.
    Source: arXiv 2507.18071 eq. 5; TRL 1.16 `importance_sampling_level="sequence"`.
    """
    ratio = safe_exp(sequence_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask))
    return clipped(ratio, advantages, mask, clip_low, clip_high, ratio_cap, None)


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
    sequence = sequence_log_ratio(log_ratio(logprobs, old_logprobs, mask), mask)
    ratio = with_token_gradient(sequence, keep(at_least_float32(logprobs), mask), cap=log_ratio_cap)
    return clipped(ratio, advantages, mask, clip_low, clip_high, None, None)


def luspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    ratio_cap: float | None = None,
) -> TokenLoss:
    """LUSPO is GSPO with each sequence's loss times its length, so that length is not penalised.

        sum_t x_t = |y| max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)),   s as in `gspo`

    The factor |y| is the sum over tokens of "seq-mean-token-sum": per token this is `gspo`.
    Departs from TRL: (1) its `loss_type="luspo"` keeps one ratio per token unless
    `importance_sampling_level="sequence"`; that is `ppo` with this aggregation.
    Source: arXiv 2602.05261; TRL 1.16 grpo_trainer.py _compute_loss.
    """
    inputs = (logprobs, old_logprobs, advantages, mask)
    return gspo(*inputs, clip_low=clip_low, clip_high=clip_high, ratio_cap=ratio_cap)


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
    `clip_ratio` defaults to PPO's 0.2, (3) its mean counts rows without a live token. From the authors:
    (4) they round the clip to float32.
    Source: arXiv 2507.20673; callsys/GMPO train_zero_math_gmpo.py@205b2bf; verl 0.9.1
    compute_policy_loss_geo_mean; TRL 1.16 experimental/gmpo.
    """
    advantages = credit(advantages, mask)
    log_r = log_ratio(logprobs, old_logprobs, mask)
    bounded = log_clip(log_r, advantages, low=clip_low, high=clip_high)
    ratio = safe_exp(sequence_log_ratio(bounded, mask))
    d = log_r.detach()
    metrics = {
        "ratio": Metric(ratio.detach().expand(mask.shape), mask),
        "clip_low": Metric((d < -clip_low) & (advantages < 0), mask),
        "clip_high": Metric((d > clip_high) & (advantages > 0), mask),
    }
    return TokenLoss(keep(-advantages * ratio, mask), metrics)
