"""Preference losses without a reference model, some with a likelihood term that keeps the policy fluent.

Scores and units: `scores.py`. `chosen_nll` is the mean negative log-likelihood per token, one per pair;
it carries the gradient, and the caller averages it over pairs with the rest.
"""

from typing import Literal

from composer_plugins.kernels.masking import at_least_float32, safe_exp
from composer_plugins.kernels.preference import links
from composer_plugins.kernels.preference.links import metric_of, plus_nll, reward_metrics
from composer_plugins.kernels.types import PairLoss, Scores

__all__ = ["alpha_po", "cpo", "cpo_simpo", "orpo", "sft", "simper", "simpo", "tpo", "tpo_l"]


def simpo(
    chosen: Scores,
    rejected: Scores,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
    link: Literal["sigmoid", "hinge"] = "sigmoid",
) -> PairLoss:
    """SimPO: scores are length-AVERAGED log-probabilities, and the margin must exceed gamma.

        h = beta (chosen - rejected - gamma_beta_ratio);   sigmoid: as DPO;   hinge: max(0, 1 - h)

    Departs from TRL 1.16's CPO trainer: (1) it takes gamma = beta * gamma_beta_ratio, (2) it adds
    cpo_alpha * NLL of the chosen: that is `cpo_simpo`.
    Source: arXiv 2405.14734 eq. 6; princeton-nlp/SimPO scripts/simpo_trainer.py@1b3e8f3 simpo_loss.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    h = beta * (chosen - rejected - gamma_beta_ratio)
    if link == "sigmoid":
        loss = links.logistic(h, label_smoothing)
    elif link == "hinge":
        loss = links.hinge(h)
    else:
        raise ValueError(f"link is {link!r}; known: 'sigmoid', 'hinge'")
    return PairLoss(loss, reward_metrics(beta * chosen, beta * rejected))


def simper(chosen: Scores, rejected: Scores) -> PairLoss:
    """SimPER: the inverse perplexities themselves, without a parameter, on length-AVERAGED log-probabilities.

        loss = -exp(chosen) + exp(rejected)

    A rejected completion that is already unlikely has no gradient.
    Source: arXiv 2502.00883; tengxiao1/SimPER scripts/simper_trainer.py@db08c97 simpo_loss, "SimPER".
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    return PairLoss(-safe_exp(chosen) + safe_exp(rejected), reward_metrics(chosen, rejected))


def cpo_simpo(
    chosen: Scores,
    rejected: Scores,
    chosen_nll: Scores,
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> PairLoss:
    """SimPO with CPO's likelihood term: simpo + nll_weight * chosen_nll.

    Source: fe1ixxu/CPO_SIMPO; TRL 1.16 experimental/cpo/cpo_trainer.py, loss_type "simpo", cpo_alpha > 0.
    """
    pair = simpo(
        chosen, rejected, beta=beta, gamma_beta_ratio=gamma_beta_ratio, label_smoothing=label_smoothing
    )
    return plus_nll(pair, chosen_nll, nll_weight)


def alpha_po(
    chosen: Scores,
    rejected: Scores,
    *,
    alpha: float,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.25,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """AlphaPO: SimPO with another shape of reward, on length-AVERAGED log-probabilities s.

        r = (1 - e^(-alpha s)) / alpha,   h = beta (r_chosen - r_rejected - gamma_beta_ratio);   link as DPO

    alpha = 0 is SimPO, whose defaults the others are: the paper tunes all of them by model.
    Departs from TRL 1.16: (1) e^(-alpha s) saturates 10 nats below overflow and is not (e^s)^(-alpha).
    Source: arXiv 2501.03884; TRL 1.16 experimental/cpo/cpo_trainer.py CPOTrainer.cpo_loss.
    """
    up, down = (links.alpha_reward(at_least_float32(s), alpha) for s in (chosen, rejected))
    loss = links.logistic(beta * (up - down - gamma_beta_ratio), label_smoothing)
    return PairLoss(loss, reward_metrics(beta * up, beta * down))


def cpo(
    chosen: Scores,
    rejected: Scores,
    chosen_nll: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
    link: Literal["sigmoid", "hinge", "square"] = "sigmoid",
) -> PairLoss:
    """CPO: DPO against a uniform reference, plus the likelihood of the chosen, on SUMMED log-probabilities.

        h = beta (chosen - rejected);   loss = link(h) + nll_weight * chosen_nll

    `link` "sigmoid" is DPO's, and "square" is IPO's, for which TRL averages the scores.
    Source: arXiv 2401.08417 eq. 3; TRL 1.16 experimental/cpo/cpo_trainer.py CPOTrainer.cpo_loss.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    margin = chosen - rejected
    if link == "sigmoid":
        loss = links.logistic(beta * margin, label_smoothing)
    elif link == "hinge":
        loss = links.hinge(beta * margin)
    elif link == "square":
        loss = links.square(margin, beta)
    else:
        raise ValueError(f"link is {link!r}; known: 'sigmoid', 'hinge', 'square'")
    return plus_nll(PairLoss(loss, reward_metrics(beta * chosen, beta * rejected)), chosen_nll, nll_weight)


def orpo(chosen: Scores, rejected: Scores, chosen_nll: Scores, *, beta: float = 0.1) -> PairLoss:
    """ORPO: likelihood of the chosen, and a preference by odds, on length-AVERAGED log-probabilities.

        loss = chosen_nll - beta log sigmoid(log odds(chosen) - log odds(rejected)),   odds = p / (1 - p)

    beta is the paper's lambda. TRL takes `chosen_nll` over prompt and completion, as the paper's code does.
    Departs from TRL 1.16: (1) odds of a certain completion are large, not inf; (2) float64 is kept.
    Source: arXiv 2403.07691 eq. 6, 7; TRL 1.16 experimental/orpo/orpo_trainer.py ORPOTrainer.odds_ratio_loss.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    loss = beta * links.logistic(links.log_odds(chosen) - links.log_odds(rejected))
    return plus_nll(PairLoss(loss, reward_metrics(beta * chosen, beta * rejected)), chosen_nll, 1.0)


def tpo(
    chosen: Scores,
    rejected: Scores,
    gold_nll: Scores,
    *,
    beta: float = 0.01,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> PairLoss:
    """TPO: CPO whose likelihood term is that of a third, gold completion.

    Source: arXiv 2405.16681; TRL 1.16 experimental/tpo/tpo_trainer.py, loss_type "sigmoid".
    """
    return cpo(chosen, rejected, gold_nll, beta=beta, label_smoothing=label_smoothing, nll_weight=nll_weight)


def tpo_l(
    chosen: Scores,
    rejected: Scores,
    gold_nll: Scores,
    *,
    gamma_beta_ratio: float,
    beta: float = 0.01,
    label_smoothing: float = 0.0,
    nll_weight: float = 1.0,
) -> PairLoss:
    """TPO-L: as `tpo`, with SimPO's margin on length-AVERAGED log-probabilities.

    Source: arXiv 2405.16681; TRL 1.16 experimental/tpo/tpo_trainer.py, loss_type "tpo-l".
    """
    return cpo_simpo(
        chosen,
        rejected,
        gold_nll,
        beta=beta,
        gamma_beta_ratio=gamma_beta_ratio,
        label_smoothing=label_smoothing,
        nll_weight=nll_weight,
    )


def sft(chosen_nll: Scores) -> PairLoss:
    """The likelihood of the chosen completion alone: a term to add to another loss.

    Departs from TRL 1.16: (1) its "sft" is one mean over the tokens of the batch; a mean over pairs
    weighted by their lengths is the same.
    Source: TRL 1.16 trainer/dpo_trainer.py, loss_type "sft".
    """
    nll = at_least_float32(chosen_nll)
    return PairLoss(nll, {"nll": metric_of(nll)})
