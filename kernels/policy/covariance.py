"""Policy losses that spare the tokens whose covariance of credit and log-probability costs entropy.

    cov_t = (A_t - mean A) (log pi(y_t) - mean log pi),   means over the live tokens of the whole batch

Shapes and units: `parts.py`. The covariance and the share of tokens are those of the tensors given:
a batch cut in two is two batches here, as it is upstream.
"""

import torch
from torch import Tensor

from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.masking import at_least_float32, keep, safe_exp
from composer_plugins.kernels.policy.clipped import grpo
from composer_plugins.kernels.policy.parts import Advantages, Mask, Tokens, credit_per_token
from composer_plugins.kernels.ratios import log_ratio


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

    Drawn without replacement: max(1, floor(cov_ratio n)) of the tokens with cov_low < cov_t < cov_high
    that PPO has not clipped already, n being the live tokens; all of them where there are fewer.
    The numbers come from `generator`, or are given as `uniform` (in [0, 1); the smallest are drawn):
    `torch.compile(fullgraph=True)` takes no generator as argument. No global random state is read. One
    number per token, padding too: another padding draws other tokens.
    Denominator: "token-mean". Departs from verl: (1) its means divide by n + 1e-8, which shows with a
    float64 mask, (2) its draw is `torch.randperm` of the global state, so that only the distribution is
    the same. The authors' scripts open PPO's clip: clip_low = clip_high = 1.
    Raises ValueError unless exactly one of `generator` and `uniform` is given.
    Source: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL@8850579 and verl 0.9.1
    trainer/ppo/core_algos.py compute_policy_loss_clip_cov.
    """
    token = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ratio = token.metrics["ratio"].value
    credit = credit_per_token(advantages, mask)
    cov = covariance(logprobs, advantages, mask)
    clipped = -credit * ratio.clamp(1 - clip_low, 1 + clip_high) > -credit * ratio
    candidates = mask & (cov > cov_low) & (cov < cov_high) & ~clipped
    numbers = torch.where(candidates, _numbers(mask, generator, uniform), torch.inf)
    drawn = candidates & (_rank(numbers) < _share(mask, cov_ratio))
    metrics = token.metrics | {"covariance": Metric(cov, mask), "drawn": Metric(drawn, mask)}
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
    """KL-Cov: no clip; the tokens of highest covariance are held at the old policy instead.

        x_t = -A r_t + kl_coef |log r_t| on the max(1, floor(cov_ratio n)) tokens of highest covariance
        x_t = -A r_t elsewhere

    n is the number of live tokens. Which of several equal covariances is highest is not specified.
    Denominator: "token-mean". The defaults are those of the authors' function, whose k_percent of 0.2 is
    a cov_ratio of 2e-3 (2e-4 in their scripts for 32B). verl's `kl_coef` is 0.1 in its configuration, 1
    in its function.
    Source: arXiv 2505.22617; PRIME-RL/Entropy-Mechanism-of-RL@8850579 and verl 0.9.1
    trainer/ppo/core_algos.py compute_policy_loss_kl_cov.
    """
    log_r = log_ratio(logprobs, old_logprobs, mask)
    ratio = safe_exp(log_r)
    cov = covariance(logprobs, advantages, mask)
    highest = mask & (_rank(torch.where(mask, -cov, torch.inf)) < _share(mask, cov_ratio))
    penalty = torch.where(highest, kl_coef * log_r.abs(), 0.0)
    metrics = {
        "ratio": Metric(ratio.detach(), mask),
        "covariance": Metric(cov, mask),
        "held": Metric(highest, mask),
    }
    return TokenLoss(keep(penalty - credit_per_token(advantages, mask) * ratio, mask), metrics)


def covariance(logprobs: Tokens, advantages: Advantages, mask: Mask) -> Tokens:
    """cov_t of each live token over the whole batch, 0 elsewhere; without a gradient."""
    credit = credit_per_token(advantages, mask)
    log_p = keep(at_least_float32(logprobs).detach(), mask)
    live = mask.sum().clamp(min=1)
    return keep((credit - credit.sum() / live) * (log_p - log_p.sum() / live), mask)


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
    """floor(fraction n) of the n live tokens, at least 1."""
    return (mask.sum().double() * fraction).floor().clamp(min=1)
