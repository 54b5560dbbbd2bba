"""Policy losses that treat tokens of high covariance apart, because they reduce the entropy most.

    cov_t = (A_t - mean A) (log pi(y_t) - mean log pi),   means over the unmasked tokens of the batch

Shapes and units: `parts.py`. The covariance and the number of tokens are those of the tensors passed: a
batch that is cut in two is two batches here, as it is upstream.
"""

import torch
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, keep, safe_exp, with_nan_of
from composer_plugins.kernels.policy.clipped import ppo
from composer_plugins.kernels.policy.parts import token_advantages
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import Advantages, Mask, Metric, TokenLoss, Tokens

__all__ = ["clip_cov", "kl_cov"]


def clip_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    generator: torch.Generator | None = None,
    uniform: Tokens | None = None,
) -> TokenLoss:
    """Clip-Cov: of the tokens of high covariance, a few drawn at random lose their loss.

        x_t = 0 on the drawn tokens, max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)) elsewhere

    max(1, floor(cov_ratio n)) tokens are drawn without replacement from those with
    cov_low < cov_t < cov_high that PPO has not clipped; n is the number of unmasked tokens.
    The random numbers come from `generator`, or are given as `uniform` (in [0, 1); the smallest are
    drawn), because `torch.compile(fullgraph=True)` accepts no generator. The global random state is not
    read. Each token has a number, padding included, so another padding draws other tokens.
    Denominator: "token-mean". Departs from verl: (1) its means divide by n + 1e-8, visible with a
    float64 mask, (2) it draws with `torch.randperm` from the global state: only the distribution is the
    same. The authors' scripts open PPO's clip: clip_low = clip_high = 1.
    Raises ValueError unless exactly one of `generator` and `uniform` is given.
    Source: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL@8850579 and verl 0.9.1
    trainer/ppo/core_algos.py compute_policy_loss_clip_cov.
    """
    token = ppo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = token.metrics["ratio"].value
    a = token_advantages(advantages, mask)
    cov = covariance(logprobs, advantages, mask)
    free = -a * ratio.clamp(1 - clip_low, 1 + clip_high) <= -a * ratio  # False for a NaN: it is not drawn
    candidates = mask & (cov > cov_low) & (cov < cov_high) & free
    numbers = torch.where(candidates, _numbers(mask, generator, uniform), torch.inf)
    drawn = candidates & (_rank(numbers) < _share(mask, cov_ratio))
    metrics = token.metrics | {"covariance": Metric(cov, mask), "drop_frac": Metric(drawn, mask)}
    return TokenLoss(torch.where(drawn, 0.0, token.loss), metrics)


def kl_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Advantages,
    mask: Mask,
    *,
    cov_ratio: float = 2e-3,
    kl_coef: float = 1.0,
) -> TokenLoss:
    """KL-Cov: no clip; the tokens of highest covariance get a penalty on their log-ratio instead.

        x_t = -A r_t + kl_coef |log r_t| on the max(1, floor(cov_ratio n)) tokens of highest covariance
        x_t = -A r_t elsewhere

    n is the number of unmasked tokens. Which of several equal covariances is highest is not specified.
    A token of log pi = -inf has no covariance (it is NaN) and counts as highest, as in verl: its loss is inf.
    Denominator: "token-mean". The defaults are those of the authors' function, whose k_percent of 0.2 is
    a cov_ratio of 2e-3 (2e-4 in their scripts for 32B). verl's `kl_coef` is 0.1 in its configuration, 1
    in its function.
    Source: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL@8850579 and verl 0.9.1
    trainer/ppo/core_algos.py compute_policy_loss_kl_cov.
    """
    log_r = log_ratio(logprobs, with_nan_of(old_logprobs, advantages), mask)
    ratio = safe_exp(log_r)
    cov = covariance(logprobs, advantages, mask)
    # A sort puts NaN last, and here it must come first. A token of log pi = -inf has a covariance of NaN,
    # because it is -inf less a mean of -inf.
    ordered = torch.where(mask, (-cov).nan_to_num(nan=-torch.inf), torch.inf)
    highest = mask & (_rank(ordered) < _share(mask, cov_ratio))
    penalty = torch.where(highest, kl_coef * log_r.abs(), 0.0)
    metrics = {
        "ratio": Metric(ratio.detach(), mask),
        "covariance": Metric(cov, mask),
        "penalty_frac": Metric(highest, mask),
    }
    return TokenLoss(keep(penalty - token_advantages(advantages, mask) * ratio, mask), metrics)


def covariance(logprobs: Tokens, advantages: Advantages, mask: Mask) -> Tokens:
    """cov_t of each unmasked token over the whole batch, 0 elsewhere; without a gradient."""
    a = token_advantages(advantages, mask)
    log_p = keep(at_least_float32(logprobs).detach(), mask)
    n = mask.sum().clamp(min=1)
    return keep((a - a.sum() / n) * (log_p - log_p.sum() / n), mask)


def _numbers(mask: Mask, generator: torch.Generator | None, uniform: Tokens | None) -> Tokens:
    if uniform is not None and generator is None:
        return at_least_float32(uniform)
    if generator is not None and uniform is None:
        return torch.rand(mask.shape, generator=generator, device=generator.device).to(mask.device)
    raise ValueError(
        "clip_cov draws tokens at random: pass generator (a torch.Generator) or uniform (numbers in "
        "[0, 1), shaped as the mask), and not both"
    )


def _rank(values: Tokens) -> Tensor:
    """How many of the batch's values stand before this one in ascending order."""
    return values.flatten().argsort(stable=True).argsort().view(values.shape)


def _share(mask: Mask, fraction: float) -> Tensor:
    """floor(fraction n) of the n unmasked tokens, at least 1."""
    return (mask.sum().double() * fraction).floor().clamp(min=1)
