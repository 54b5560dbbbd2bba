"""Preference losses over pairs (chosen, rejected), on sequence scores, one loss per pair.

Scores are log-probabilities of whole completions, in nats, [pairs]: make them with `sequence_logprobs`.
Every loss here is a link of a margin h. The caller weights and averages the pairs. Gradients flow into
the policy's scores only.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from composer_plugins.kernels.contract import Metric, PairLoss
from composer_plugins.kernels.masking import at_least_float32, masked_mean, masked_sum

Scores = Float[Tensor, " pairs"]


def sequence_logprobs(
    logprobs: Float[Tensor, "*batch tokens"],
    mask: Bool[Tensor, "*batch tokens"],
    *,
    average: bool = False,
) -> Float[Tensor, "*batch"]:
    """log pi(y | x): the sum over live tokens, or with `average` their mean (SimPO).

    `logprobs[t]` is that of token t itself: shift logits against labels before. An empty row gives 0.
    Departs from eric-mitchell/dpo@f8b8c0f and SimPO@1b3e8f3: (1) their average of an empty row is NaN.
    """
    x = at_least_float32(logprobs)
    return masked_mean(x, mask) if average else masked_sum(x, mask)


def dpo(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """DPO, and with `label_smoothing` cDPO, on SUMMED log-probabilities.

        h = beta [(chosen - ref_chosen) - (rejected - ref_rejected)]
        loss = -(1 - eps) log sigmoid(h) - eps log sigmoid(-h)

    Departs from TRL 1.16: (1) its "sigmoid" ignores label_smoothing.
    Source: arXiv 2305.18290 eq. 7; eric-mitchell/direct-preference-optimization trainers.py@f8b8c0f.
    """
    chosen_reward = beta * (at_least_float32(chosen) - at_least_float32(ref_chosen).detach())
    rejected_reward = beta * (at_least_float32(rejected) - at_least_float32(ref_rejected).detach())
    loss = logistic(chosen_reward - rejected_reward, label_smoothing)
    return PairLoss(loss, _rewards(chosen_reward, rejected_reward))


def simpo(
    chosen: Scores,
    rejected: Scores,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
    link: Literal["sigmoid", "hinge"] = "sigmoid",
) -> PairLoss:
    """SimPO: no reference; scores are length-AVERAGED log-probabilities, and the margin must exceed gamma.

        h = beta (chosen - rejected - gamma_beta_ratio);   sigmoid: as DPO;   hinge: max(0, 1 - h)

    Departs from TRL 1.16's CPO trainer: (1) it takes gamma = beta * gamma_beta_ratio, (2) it adds
    cpo_alpha * NLL of the chosen.
    Source: arXiv 2405.14734 eq. 6; princeton-nlp/SimPO scripts/simpo_trainer.py@1b3e8f3.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    h = beta * (chosen - rejected - gamma_beta_ratio)
    if link == "sigmoid":
        loss = logistic(h, label_smoothing)
    elif link == "hinge":
        loss = torch.relu(1 - h)
    else:
        raise ValueError(f"link is {link!r}; known: 'sigmoid', 'hinge'")
    return PairLoss(loss, _rewards(beta * chosen, beta * rejected))


def logistic(h: Scores, label_smoothing: float) -> Scores:
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h): cross-entropy of a label flipped with chance eps."""
    loss = -(1 - label_smoothing) * F.logsigmoid(h)
    # Without smoothing, no second term: a pair whose margin is infinite would make it 0 * inf.
    return loss if label_smoothing == 0 else loss - label_smoothing * F.logsigmoid(-h)


def _rewards(chosen: Scores, rejected: Scores) -> dict[str, Metric]:
    everywhere = torch.ones_like(chosen, dtype=torch.bool)
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "rewards/chosen": Metric(chosen, everywhere),
        "rewards/rejected": Metric(rejected, everywhere),
        "rewards/margins": Metric(chosen - rejected, everywhere),
        "rewards/accuracies": Metric((chosen > rejected).to(chosen), everywhere),
    }
