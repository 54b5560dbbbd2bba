"""The inputs of a preference loss: one score per completion, and one weight per pair.

Scores are log-probabilities of whole completions, in nats: summed or averaged over tokens. `logprobs[t]`
is that of token t itself: shift logits against labels before.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, masked_mean, masked_sum, safe_exp
from composer_plugins.kernels.types import Mask, Metric, PairLoss, Scores, Tokens

__all__ = ["ld_logprobs", "sequence_logprobs", "weighted", "wpo_weights"]


def sequence_logprobs(logprobs: Tokens, mask: Mask, *, average: bool = False) -> Float[Tensor, "*batch"]:
    """log pi(y | x): the sum over unmasked tokens, or with `average` their mean (SimPO).

    An empty row gives 0.
    Departs from eric-mitchell/dpo@f8b8c0f and SimPO@1b3e8f3: (1) their average of an empty row is NaN.
    """
    x = at_least_float32(logprobs)
    return masked_mean(x, mask) if average else masked_sum(x, mask)


def ld_logprobs(
    logprobs: Tokens, mask: Mask, other_mask: Bool[Tensor, "*batch other_tokens"], *, ld_alpha: float
) -> Float[Tensor, "*batch"]:
    """LD-DPO's score: tokens beyond the length of the pair's other completion weigh `ld_alpha`.

        score = sum_{i <= n} log pi(y_i) + ld_alpha sum_{i > n} log pi(y_i),   n = min(|y|, |other|)

    i counts unmasked tokens. ld_alpha = 1 is the plain sum; policy and reference are scored alike.
    Source: arXiv 2409.06411; TRL 1.16 trainer/dpo_trainer.py DPOTrainer._compute_loss, `ld_alpha`.
    """
    shared = mask.cumsum(-1) <= other_mask.sum(-1, keepdim=True)
    x = at_least_float32(logprobs)
    return masked_sum(x, mask & shared) + ld_alpha * masked_sum(x, mask & ~shared)


def wpo_weights(logprobs: Tokens, log_sum_sq_probs: Tokens, mask: Mask) -> Float[Tensor, "*batch"]:
    """WPO's weight of a completion: how near it is to what the policy itself would sample; detached.

        w(y) = exp(mean_t [log pi(y_t) - log sum_v pi(v)^2])

    A pair weighs w(chosen) w(rejected): see `weighted`. An empty row weighs 1.
    Source: arXiv 2406.11827 eq. 2; TRL 1.16 trainer/dpo_trainer.py DPOTrainer._compute_loss, `use_weighting`.
    """
    aligned = at_least_float32(logprobs).detach() - at_least_float32(log_sum_sq_probs).detach()
    return safe_exp(masked_mean(aligned, mask))


def weighted(pair: PairLoss, weights: Scores) -> PairLoss:
    """The loss of each pair times its weight, which is detached; the caller's mean is over all pairs.

    For example WPO's weights, or how many teachers agree on a pair. A weight of 0 takes the pair out,
    value and gradient, whatever its loss. The weights are a metric too.
    """
    w = at_least_float32(weights).detach()
    # torch.where, because an infinite loss times 0 would be NaN.
    loss = torch.where(w == 0, 0.0, pair.loss) * w
    return PairLoss(loss, pair.metrics | {"weights": Metric(w, torch.ones_like(w, dtype=torch.bool))})
