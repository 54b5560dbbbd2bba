"""DPO and its successors: a link of the margin between two rewards, against a reference policy.

Scores and units: `scores.py`. Every loss here is one per pair; the caller weights and averages them.
Gradients flow into the policy's scores only. u is log pi / pi_ref of a completion; `divergence` and
`alpha` replace it by another f-DPO reward (`links.divergence_reward`).
"""

import math

import torch
import torch.nn.functional as F

from composer_plugins.kernels.masking import at_least_float32, below_overflow, bounded
from composer_plugins.kernels.preference import links
from composer_plugins.kernels.preference.links import Divergence, divergence_reward, log_ratios
from composer_plugins.kernels.presets import preset
from composer_plugins.kernels.types import Metric, PairLoss, Scores

__all__ = [
    "aot",
    "aot_unpaired",
    "cdpo",
    "discopop",
    "dpo",
    "exo_pair",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
]

# Beyond +-SATURATED a sigmoid is exactly 0 or 1 in every dtype: a product with it is a constant.
SATURATED = 1e4


def dpo(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> PairLoss:
    """DPO, with `label_smoothing` cDPO, with `divergence` f-DPO, on SUMMED log-probabilities.

        h = beta (u_chosen - u_rejected),   loss = -(1 - eps) log sigmoid(h) - eps log sigmoid(-h)

    Departs from TRL 1.16: (1) its "sigmoid" ignores label_smoothing.
    Source: arXiv 2305.18290 eq. 7; eric-mitchell/direct-preference-optimization trainers.py@f8b8c0f
    preference_loss; arXiv 2309.16240 for other divergences.
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = _margin(us, beta, divergence, alpha)
    return PairLoss(links.logistic(h, label_smoothing), _logged(us, beta))


def cdpo(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    label_smoothing: float,
    beta: float = 0.1,
) -> PairLoss:
    """Conservative DPO: `dpo` for labels wrong with chance `label_smoothing`, which no paper fixes.

    Source: ericmitchell.ai/cdpo.pdf; eric-mitchell/direct-preference-optimization trainers.py@f8b8c0f.
    """
    scores = (chosen, rejected, ref_chosen, ref_rejected)
    return dpo(*scores, beta=beta, label_smoothing=label_smoothing)


sigmoid_norm = preset(
    dpo,
    "sigmoid_norm",
    """Length-normalised DPO: `dpo` on length-AVERAGED log-probabilities.

    Its margins are some tens of times smaller than DPO's, so a useful beta is larger.
    Source: TRL 1.16 trainer/dpo_trainer.py, loss_type "sigmoid_norm"; arXiv 2411.15124 (Tulu 3).
    """,
    without=("label_smoothing", "divergence", "alpha"),
)


def robust(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> PairLoss:
    """rDPO: over labels flipped with chance eps < 1/2, its mean is DPO's loss of the true labels.

        loss = [-(1 - eps) log sigmoid(h) + eps log sigmoid(-h)] / (1 - 2 eps),   h as DPO

    Source: arXiv 2403.00409; TRL 1.16 trainer/dpo_trainer.py, loss_type "robust".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = _margin(us, beta, divergence, alpha)
    # With this smoothing, which is below 0, `logistic` is the formula above.
    loss = links.logistic(h, -label_smoothing / (1 - 2 * label_smoothing))
    return PairLoss(loss, _logged(us, beta))


def hinge(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> PairLoss:
    """The hinge of SLiC on DPO's margin (RSO's hinge-norm): max(0, 1 - h), h as DPO.

    Source: arXiv 2305.10425, 2309.06657; TRL 1.16 trainer/dpo_trainer.py, loss_type "hinge".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = _margin(us, beta, divergence, alpha)
    return PairLoss(links.hinge(h), _logged(us, beta))


def ipo(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, *, beta: float = 0.1
) -> PairLoss:
    """IPO: the margin is pulled to 1 / (2 beta), and no further.

        loss = (u_chosen - u_rejected - 1 / (2 beta))^2

    Scores are sums as the paper writes it, or averages: that is the caller's choice, and upstreams differ.
    Source: arXiv 2310.12036 eq. 17; eric-mitchell/direct-preference-optimization trainers.py@f8b8c0f
    preference_loss (sums); TRL 1.16 trainer/dpo_trainer.py, loss_type "ipo" (averages).
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return PairLoss(links.square(us[0] - us[1], beta), _logged(us, beta))


def exo_pair(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> PairLoss:
    """EXO on a pair: the reverse KL from the policy's preference sigmoid(h) to the label 1 - eps, h as DPO.

    Departs from TRL 1.16: (1) an infinite margin has a loss, not NaN.
    Source: arXiv 2402.00856 eq. 16; TRL 1.16 trainer/dpo_trainer.py, loss_type "exo_pair".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = bounded(_margin(us, beta, divergence, alpha), -SATURATED, SATURATED)
    win, lose = F.logsigmoid(h), F.logsigmoid(-h)
    loss = win.exp() * (win - math.log1p(-label_smoothing)) + lose.exp() * (lose - math.log(label_smoothing))
    return PairLoss(loss, _logged(us, beta))


def discopop(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
    divergence: Divergence = "reverse_kl",
    alpha: float = 0.5,
) -> PairLoss:
    """DiscoPOP's log-ratio modulated loss: logistic left of 0, exponential right of it, h as DPO.

        loss = -sigmoid(-h / tau) log sigmoid(h) + sigmoid(h / tau) exp(-h)

    Departs from TRL 1.16: (1) exp(-h) is taken together with its gate, so that h = -100 is not 0 * inf.
    Source: arXiv 2406.08414 eq. 5; TRL 1.16 trainer/dpo_trainer.py, loss_type "discopop".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = _margin(us, beta, divergence, alpha)
    gate = h.clamp(-SATURATED, SATURATED)
    exponential = below_overflow(F.logsigmoid(gate / tau) - gate).exp()  # sigmoid(h / tau) exp(-h)
    loss = torch.sigmoid(-gate / tau) * links.logistic(h) + exponential
    return PairLoss(loss, _logged(us, beta))


def aot(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """AOT: the policy's margins dominate the reference's as distributions, each sorted over the batch.

        h = beta (sort(chosen - rejected) - sort(ref_chosen - ref_rejected));   loss as DPO

    loss[i] is that of the i-th smallest margin, not of pair i; metrics are by pair. The loss is NOT one
    of each pair alone: cut into micro-batches or onto ranks, it changes.
    Source: arXiv 2406.05882; TRL 1.16 trainer/dpo_trainer.py, loss_type "aot".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    margins = at_least_float32(chosen) - at_least_float32(rejected)
    ref_margins = at_least_float32(ref_chosen) - at_least_float32(ref_rejected)
    h = beta * (_sorted(margins) - _sorted(ref_margins.detach()))
    return PairLoss(links.logistic(h, label_smoothing), _logged(us, beta))


def aot_unpaired(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """AOT of unpaired data: as `aot`, with h = beta (sort(u_chosen) - sort(u_rejected)).

    Cut into micro-batches or onto ranks, this loss changes too.
    Source: arXiv 2406.05882; TRL 1.16 trainer/dpo_trainer.py, loss_type "aot_unpaired".
    """
    us = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = beta * (_sorted(us[0]) - _sorted(us[1]))
    return PairLoss(links.logistic(h, label_smoothing), _logged(us, beta))


def _margin(us: tuple[Scores, Scores], beta: float, divergence: Divergence, alpha: float) -> Scores:
    chosen, rejected = (divergence_reward(u, divergence, alpha) for u in us)
    return beta * (chosen - rejected)


def _logged(us: tuple[Scores, Scores], beta: float) -> dict[str, Metric]:
    return links.reward_metrics(beta * us[0], beta * us[1])


def _sorted(x: Scores) -> Scores:
    return x.sort(dim=0, stable=True).values
