"""Advantages by how often a prompt is solved, and by how often a reference solves it."""

import torch

from composer_plugins.kernels.groups import Singleton, deviations, grouped, with_singletons
from composer_plugins.kernels.masking import at_least_float32, keep, with_nan_of
from composer_plugins.kernels.types import GroupIds, ReferenceRewards, Rewards, RowMask

__all__ = ["a2po", "bnpo", "pass_at_k_training"]

MOST = 1e6  # BNPO's bound on a weight


def pass_at_k_training(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    k: int,
    eps: float = 1e-6,
    num_groups: int | None = None,
) -> Rewards:
    """Pass@k training: the advantage of a rollout in all groups of k that could be drawn from its n.

        rho = 1 - C(n_neg, k) / C(n, k),    sigma = sqrt(rho (1 - rho))
        success: A = (1 - rho) / (sigma + eps)
        failure: A = (1 - rho - C(n_neg - 1, k - 1) / C(n - 1, k - 1)) / (sigma + eps)

    rho is the chance that one of k succeeds. A reward above 0 is a success. A group of fewer than k rows
    counts as pass@n. Groups of which any k contain a success get 0, and so do groups without a success.
    Departs from its authors: (1) any reward above 0 is a success, and any other a failure; they take
    rewards of 1 and 0, and leave other rewards as they are; (2) a group of fewer than k is not NaN.
    Source: arXiv 2508.10751; RUCAIBox/Passk_Training code/passk_adv.py@c3ba575.
    """
    pools = grouped(group_ids, mask, num_groups)
    r = at_least_float32(rewards).detach()
    n = with_nan_of(pools.sum(torch.ones_like(r)), pools.sum(r))  # a NaN reward makes its group NaN
    n_neg = pools.sum((r <= 0).to(r.dtype))
    others_fail = torch.ones_like(n)  # C(n_neg - 1, k - 1) / C(n - 1, k - 1)
    for i in range(1, k):
        factor = (n_neg - i).clamp(min=0) / (n - i).clamp(min=1)
        others_fail = others_fail * torch.where(n > i, factor, 1.0)
    all_fail = others_fail * n_neg / n.clamp(min=1)  # 1 - rho
    sigma = (all_fail * (1 - all_fail)).sqrt()
    scale = torch.where(sigma == 0, 0.0, 1 / (sigma + eps))
    success, failure = all_fail * scale, (all_fail - others_fail) * scale
    return pools.keep(torch.where(r > 0, pools.rows(success), pools.rows(failure)))


def bnpo(
    rewards: Rewards,
    group_ids: GroupIds,
    mask: RowMask | None = None,
    *,
    singleton: Singleton = "zero",
    num_groups: int | None = None,
) -> Rewards:
    """BNPO: A_i = (R_i - p) / f(p; alpha, beta), with p the mean reward of the group and f a Beta density.

        alpha = max(1 + a / 3, 1),  beta = max(1 + b / 3, 1)
        a = (m (1 - m) / v - 1) m,  b = (m (1 - m) / v - 1) (1 - m)

    m and v are the mean and the sample variance of p over the groups of the batch, so (a, b) is the Beta
    distribution that fits them. Rewards lie in [0, 1]. 1 / f is at most 1e6. With one group, or where
    all p are equal, f is 1. The number is one of the whole batch: compute it before you cut the batch.
    A group of one has no baseline: it counts nowhere and gets 0, or with `singleton="raw"` its p is 0.
    Departs from its authors: (1) equal p give f = 1 and not NaN; (2) p outside [0, 1] counts as the nearer
    end and is no error; (3) a group of one is left out.
    Source: arXiv 2506.02864; changyi7231/BNPO recipe/bnpo/src/bnpo_ray_trainer.py@a9c51b9.
    """
    group = deviations(rewards, grouped(group_ids, mask, num_groups))
    least = 1 if singleton == "raw" else 2
    counts = group.size >= least
    p = torch.where(group.size == 1, 0.0, group.mean.clamp(0, 1))
    m = keep(p, counts).sum() / counts.sum().clamp(min=1)
    v = keep((p - m).square(), counts).sum() / (counts.sum() - 1).clamp(min=1)
    concentration = m * (1 - m) / torch.where(v == 0, 1.0, v) - 1
    alpha = (1 + concentration * m / 3).clamp(min=1)
    beta = (1 + concentration * (1 - m) / 3).clamp(min=1)
    log_beta = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
    log_f = torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p) - log_beta
    weight = torch.where(v == 0, 1.0, (-log_f).exp().clamp(max=MOST))
    weight = group.pools.rows(weight)
    raw = at_least_float32(rewards).detach() * weight
    return with_singletons(group.flattened() * weight, group, raw, singleton)


def a2po(
    rewards: Rewards, reference_rewards: ReferenceRewards, mask: RowMask | None = None, *, beta: float = 0.5
) -> Rewards:
    """A*-PO: A_i = R_i - V*, the value of the best policy near the reference, from the reference's rewards.

        V* = beta log((1/m) sum_j exp(R_ref,j / beta)),   j over m completions of the reference

    beta is the paper's beta_1: at 0 V* is the best reward of the reference, at infinity the mean. The
    completions of the reference are drawn once, before the training, so that one rollout of each prompt is
    enough.
    Source: arXiv 2505.20686; TRL 1.16 experimental/a2po/a2po_trainer.py A2POTrainer.compute_loss.
    """
    r, ref = at_least_float32(rewards).detach(), at_least_float32(reference_rewards).detach()
    best = ref.amax(-1)  # taken out of the sum: exp stays finite, and equal rewards are their own value
    value = best + beta * ((ref - best.unsqueeze(-1)) / beta).exp().mean(-1).log()
    advantages = r - with_nan_of(value, ref.sum(-1))
    return advantages if mask is None else keep(advantages, mask)
