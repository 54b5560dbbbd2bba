"""Losses of completions that are only known to be good or bad: one loss per completion, [rows].

`scores` and `ref_scores` are summed log-probabilities in nats under policy and reference, `desirable` is
True for a good completion. r = beta (scores - ref_scores). Gradients flow into `scores` only.
"""

import torch
import torch.nn.functional as F

from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.types import Metric, PairLoss, RowMask, RowScores, Scalar

__all__ = ["apo_zero_unpaired", "bco", "kto", "kto_reference_point"]


def kto_reference_point(mismatched: RowScores, ref_mismatched: RowScores) -> Scalar:
    """KTO's reference point: an estimate of KL(pi || pi_ref) in nats, at least 0, detached.

    The mean log-ratio of completions paired with another prompt, 0 without any. Over several ranks, take
    the mean before the clamp.
    Source: arXiv 2402.01306; TRL 1.16 trainer/kto_trainer.py KTOTrainer._compute_loss.
    """
    ratios = at_least_float32(mismatched) - at_least_float32(ref_mismatched)
    return (ratios.sum() / max(ratios.numel(), 1)).clamp(min=0).detach()


def kto(
    scores: RowScores,
    ref_scores: RowScores,
    desirable: RowMask,
    reference_kl: Scalar,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PairLoss:
    """KTO: a prospect-theoretic value of each completion, with the mean KL z as the reference point.

        good: w_d sigmoid(-(r - beta z));   bad: w_u sigmoid(r - beta z)

    z is `reference_kl`, of `kto_reference_point`, detached. With v the paper's value, this is lambda - v.
    Source: arXiv 2402.01306 eq. 7; TRL 1.16 trainer/kto_trainer.py, loss_type "kto".
    """
    r = _reward(scores, ref_scores, beta)
    gap = r - beta * at_least_float32(reference_kl).detach()
    loss = torch.where(
        desirable, desirable_weight * torch.sigmoid(-gap), undesirable_weight * torch.sigmoid(gap)
    )
    return PairLoss(loss, _logged(r, desirable))


def apo_zero_unpaired(
    scores: RowScores,
    ref_scores: RowScores,
    desirable: RowMask,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PairLoss:
    """APO-zero without pairs: KTO with the reference point 0.

    Source: arXiv 2408.06266; TRL 1.16 trainer/kto_trainer.py, loss_type "apo_zero_unpaired".
    """
    nothing = at_least_float32(scores).new_zeros(())
    return kto(
        scores,
        ref_scores,
        desirable,
        nothing,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


def bco(
    scores: RowScores,
    ref_scores: RowScores,
    desirable: RowMask,
    reward_shift: Scalar,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PairLoss:
    """BCO: a binary classifier of completions whose logit is the reward less a running mean of rewards.

        good: -w_d log sigmoid(r - delta);   bad: -w_u log sigmoid(-(r - delta))

    delta is `reward_shift`, detached: the mean of the mean reward of good and that of bad completions.
    Leaves out the paper's density-ratio weights of bad completions (unmatched prompts).
    Source: arXiv 2404.04656.
    """
    r = _reward(scores, ref_scores, beta)
    gap = r - at_least_float32(reward_shift).detach()
    loss = torch.where(
        desirable, -desirable_weight * F.logsigmoid(gap), -undesirable_weight * F.logsigmoid(-gap)
    )
    return PairLoss(loss, _logged(r, desirable))


def _reward(scores: RowScores, ref_scores: RowScores, beta: float) -> RowScores:
    return beta * (at_least_float32(scores) - at_least_float32(ref_scores).detach())


def _logged(r: RowScores, desirable: RowMask) -> dict[str, Metric]:
    return {
        "rewards/chosen": Metric(r.detach(), desirable),
        "rewards/rejected": Metric(r.detach(), ~desirable),
    }
