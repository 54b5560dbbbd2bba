"""What lies between scores and a loss: rewards of a completion, and links of a margin h. All in nats."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from composer_plugins.kernels.masking import at_least_float32, below_overflow, with_nan_gradient
from composer_plugins.kernels.types import Metric, PairLoss, Scores

__all__ = ["logistic"]

Values = Float[Tensor, "..."]
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

LIMIT = 1e-6  # an exponent nearer than this to its limit takes the limit: the quotient would be 0 / 0
LOG_HALF = -math.log(2.0)
CERTAIN = -1e-30  # at a log-probability of 0 the log-odds and their gradient are infinite


def log_ratios(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores
) -> tuple[Scores, Scores]:
    """log pi / pi_ref of both completions; no gradient reaches the reference."""
    return (
        at_least_float32(chosen) - at_least_float32(ref_chosen).detach(),
        at_least_float32(rejected) - at_least_float32(ref_rejected).detach(),
    )


def divergence_reward(u: Values, divergence: Divergence, alpha: float) -> Values:
    """f'(e^u) of a log-ratio u: the reward of f-DPO, without the constant that cancels in a pair.

        reverse_kl: u,   forward_kl: 1 - e^-u,   js: log 2 + log sigmoid(u)
        alpha: (e^((alpha - 1) u) - 1) / (alpha - 1)

    `alpha` is that of the alpha divergence only: 1 gives reverse KL, 0 forward KL.
    Departs from TRL 1.16: (1) an exponent saturates 10 nats below overflow; TRL's saturates at 80 nats for
    `alpha` and not at all for `forward_kl`; (2) its float64 alpha divergence is a KeyError.
    Source: arXiv 2309.16240 table 1; TRL 1.16 trainer/dpo_trainer.py, `f_divergence_type`.
    """
    if divergence == "reverse_kl":
        return u
    if divergence == "forward_kl":
        return _power(u, -1.0)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(u)
    if divergence == "alpha":
        return _power(u, alpha - 1)
    known = "'reverse_kl', 'forward_kl', 'js', 'alpha'"
    raise ValueError(f"divergence is {divergence!r}; known: {known}")


def alpha_reward(score: Values, alpha: float) -> Values:
    """(1 - p^-alpha) / alpha of a log-probability; `alpha` = 0 gives log p itself (AlphaPO)."""
    return _power(score, -alpha)


def _power(u: Values, k: float) -> Values:
    """(e^(k u) - 1) / k, whose limit at k = 0 is u."""
    return u if abs(k) < LIMIT else torch.expm1(below_overflow(k * u)) / k


def log_odds(score: Values) -> Values:
    """log p / (1 - p) of a log-probability; of a certain completion large, not infinite.

    log(1 - p) is log1p(-e^s) far from 0 and log(-expm1(s)) near it: each loses its digits elsewhere.
    """
    s = score.clamp(max=CERTAIN)
    far = torch.log1p(-torch.exp(s.clamp(max=LOG_HALF)))
    near = torch.log(-torch.expm1(s.clamp(min=LOG_HALF)))
    return s - torch.where(s < LOG_HALF, far, near)


def logistic(h: Values, label_smoothing: float = 0.0) -> Values:
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h): cross-entropy of a label flipped with chance eps."""
    loss = -(1 - label_smoothing) * F.logsigmoid(h)
    # Without smoothing, no second term: a pair whose margin is infinite would make it 0 * inf.
    return loss if label_smoothing == 0 else loss - label_smoothing * F.logsigmoid(-h)


def hinge(h: Values) -> Values:
    """max(0, 1 - h)."""
    return with_nan_gradient(torch.relu(1 - h))


def square(h: Values, beta: float) -> Values:
    """(h - 1 / (2 beta))^2, of a margin that is not yet scaled."""
    return (h - 1 / (2 * beta)) ** 2


def reward_metrics(chosen: Scores, rejected: Scores) -> dict[str, Metric]:
    """What one logs of a pair, detached: both rewards, their margin, and whether the chosen one is larger."""
    everywhere = torch.ones_like(chosen, dtype=torch.bool)
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": Metric(chosen, everywhere),
        "rewards/rejected": Metric(rejected, everywhere),
        "rewards/margins": Metric(chosen - rejected, everywhere),
        "rewards/accuracies": Metric((chosen > rejected).to(chosen), everywhere),
    }


def plus_nll(pair: PairLoss, nll: Scores, weight: float) -> PairLoss:
    """The pair's loss and a likelihood term, left out, not multiplied, at weight 0: it may be infinite."""
    nll = at_least_float32(nll)
    loss = pair.loss if weight == 0 else pair.loss + weight * nll
    return PairLoss(loss, pair.metrics | {"nll": metric_of(nll)})


def metric_of(x: Scores) -> Metric:
    """`x` as a metric that counts for every pair."""
    return Metric(x.detach(), torch.ones_like(x, dtype=torch.bool))
