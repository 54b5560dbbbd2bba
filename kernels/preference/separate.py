"""Losses of pairs in which each completion has its own term: not functions of the margin alone.

Arguments as in `dpo_family.py`; r = beta log pi / pi_ref of a completion.
"""

import torch
import torch.nn.functional as F

from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.preference.links import log_ratios, logistic, plus_nll, reward_metrics
from composer_plugins.kernels.types import PairLoss, Scalar, Scores

__all__ = ["apo_down", "apo_zero", "bco_pair", "cal_dpo", "nca_pair", "rpo", "sppo_hard"]


def rpo(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    chosen_nll: Scores,
    *,
    beta: float = 0.1,
    nll_weight: float = 1.0,
) -> PairLoss:
    """Iterative RPO: DPO plus the likelihood of the chosen, which keeps it from becoming less likely.

        h = beta (u_chosen - u_rejected),   loss = -log sigmoid(h) + nll_weight * chosen_nll

    nll_weight is the paper's alpha.
    Source: arXiv 2404.19733; NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a DPOLossFn.
    """
    up, down = _rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return plus_nll(PairLoss(logistic(up - down), reward_metrics(up, down)), chosen_nll, nll_weight)


def nca_pair(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, *, beta: float = 0.1
) -> PairLoss:
    """NCA on a pair: noise contrast, which keeps the chosen completion from becoming less likely.

        loss = -log sigmoid(r_chosen) - (1/2) log sigmoid(-r_chosen) - (1/2) log sigmoid(-r_rejected)

    Source: arXiv 2402.05369; TRL 1.16 trainer/dpo_trainer.py, loss_type "nca_pair".
    """
    up, down = _rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    loss = -F.logsigmoid(up) - 0.5 * F.logsigmoid(-up) - 0.5 * F.logsigmoid(-down)
    return PairLoss(loss, reward_metrics(up, down))


def bco_pair(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    reward_shift: Scalar | None = None,
) -> PairLoss:
    """BCO on a pair: a binary classifier whose logit is the reward, less a running mean of all rewards.

        loss = -log sigmoid(r_chosen - delta) - log sigmoid(-(r_rejected - delta))

    delta is `reward_shift`, detached, 0 unless given: the caller keeps the running mean of
    (E r_chosen + E r_rejected) / 2.
    Departs from TRL 1.16: (1) it has no delta.
    Source: arXiv 2404.04656; TRL 1.16 trainer/dpo_trainer.py, loss_type "bco_pair".
    """
    up, down = _rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    delta = 0.0 if reward_shift is None else at_least_float32(reward_shift).detach()
    loss = -F.logsigmoid(up - delta) - F.logsigmoid(delta - down)
    return PairLoss(loss, reward_metrics(up, down))


def sppo_hard(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, *, beta: float = 0.1
) -> PairLoss:
    """SPPO where the winner wins surely: both log-ratios are regressed on +-1 / (2 beta).

        loss = (u_chosen - 1 / (2 beta))^2 + (u_rejected + 1 / (2 beta))^2,   u = log pi / pi_ref

    beta is the inverse of the paper's eta.
    Source: arXiv 2405.00675 eq. 4.7; TRL 1.16 trainer/dpo_trainer.py, loss_type "sppo_hard".
    """
    up, down = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    loss = (up - 0.5 / beta) ** 2 + (down + 0.5 / beta) ** 2
    return PairLoss(loss, reward_metrics(beta * up, beta * down))


def cal_dpo(
    chosen: Scores,
    rejected: Scores,
    ref_chosen: Scores,
    ref_rejected: Scores,
    *,
    beta: float = 0.1,
    calibration_weight: float = 0.5,
) -> PairLoss:
    """Cal-DPO: DPO whose rewards also have a scale: each log-ratio is pulled to +-1 / (2 beta).

        loss = -log sigmoid(u_chosen - u_rejected)
               + calibration_weight [(u_chosen - 1 / (2 beta))^2 + (u_rejected + 1 / (2 beta))^2]

    u = log pi / pi_ref. The first term has no beta. The weight is that of the authors' code.
    Source: arXiv 2412.14516; tengxiao1/Cal-DPO scripts/dpo_trainer.py dpo_loss@7d16b46, loss_type "Cal-DPO".
    """
    up, down = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    calibration = (up - 0.5 / beta) ** 2 + (down + 0.5 / beta) ** 2
    loss = -F.logsigmoid(up - down) + calibration_weight * calibration
    return PairLoss(loss, reward_metrics(up, down))


def apo_zero(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, *, beta: float = 0.1
) -> PairLoss:
    """APO-zero, for a chosen completion better than the policy: sigmoid(-r_chosen) + sigmoid(r_rejected).

    Source: arXiv 2408.06266 eq. 7; TRL 1.16 trainer/dpo_trainer.py, loss_type "apo_zero".
    """
    up, down = _rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return PairLoss(torch.sigmoid(-up) + torch.sigmoid(down), reward_metrics(up, down))


def apo_down(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, *, beta: float = 0.1
) -> PairLoss:
    """APO-down, for a chosen completion worse than the policy: both go down, the rejected one further.

        loss = sigmoid(r_chosen) + sigmoid(r_rejected - r_chosen)

    Source: arXiv 2408.06266 eq. 8; TRL 1.16 trainer/dpo_trainer.py, loss_type "apo_down".
    """
    up, down = _rewards(chosen, rejected, ref_chosen, ref_rejected, beta)
    return PairLoss(torch.sigmoid(up) + torch.sigmoid(down - up), reward_metrics(up, down))


def _rewards(
    chosen: Scores, rejected: Scores, ref_chosen: Scores, ref_rejected: Scores, beta: float
) -> tuple[Scores, Scores]:
    up, down = log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    return beta * up, beta * down
