"""On-policy distillation as policy gradients, against loops over tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels import policy
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches

Batch = dict[str, Tensor]
few = settings(max_examples=30)


def student(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, the rollout's, a teacher's, mask."""
    teacher = (batch["logprobs"] * 0.7 + batch["old_logprobs"].sin()).clamp(max=0)
    return batch["logprobs"].clone().requires_grad_(), batch["old_logprobs"], teacher, batch["mask"]


@pytest.mark.parametrize("task", [False, True])
@few
@given(batch=token_batches())
def test_opd_is_what_a_loop_over_tokens_makes_of_it(batch: Batch, task: bool) -> None:
    """opd@tinker is this with a coefficient of 1."""
    inputs = logprobs, rollout, teacher, mask = student(batch)
    advantages = batch["advantages"] if task else None
    wanted, gradient = torch.zeros_like(rollout), torch.zeros_like(rollout)
    for i in map(tuple, mask.nonzero().tolist()):
        lp, lq, lt = float(logprobs[i].detach()), float(rollout[i]), float(teacher[i])
        credit = 0.5 * (lt - lq) + (float(batch["advantages"][i[0], 0]) if task else 0.0)
        wanted[i] = gradient[i] = -math.exp(lp - lq) * credit
    ours = reductions.kernel("policy", "opd@tinker")(*inputs, advantages=advantages, kl_coef=0.5).loss
    assert_parity(ours, wanted, terms=2)
    assert_parity(torch.autograd.grad(ours.sum(), logprobs)[0], gradient, terms=2)


@few
@given(batch=token_batches())
def test_iw_opd_is_what_a_loop_over_tokens_makes_of_it(batch: Batch) -> None:
    inputs = logprobs, rollout, teacher, mask = student(batch)
    wanted, gradient = torch.zeros_like(rollout), torch.zeros_like(rollout)
    for b, row in enumerate(mask):
        unmasked = row.nonzero().flatten().tolist()
        gaps = [float(teacher[b, t] - rollout[b, t]) for t in unmasked]
        total, seen = max(math.fsum(map(abs, gaps)), 1e-8), 0.0
        for t, gap in zip(unmasked, gaps, strict=True):
            gradient[b, t] = -(1 + 0.7 * (1 - seen / total)) * gap
            wanted[b, t] = gradient[b, t] * float(logprobs[b, t].detach())
            seen += abs(gap)
    ours = policy.iw_opd(*inputs, gamma=0.7).loss
    assert_parity(ours, wanted, terms=mask.shape[-1] + 1)
    assert_parity(torch.autograd.grad(ours.sum(), logprobs)[0], gradient, terms=mask.shape[-1] + 1)


@few
@given(batch=token_batches())
def test_ref_kl_lets_a_token_rise_as_far_as_it_will(batch: Batch) -> None:
    logprobs, rollout, teacher, mask = student(batch)
    ours = policy.ref_kl(logprobs, rollout, teacher, mask, tv_low=0.05, kl_tau=0.1).loss
    wanted = torch.zeros_like(rollout)
    for i in map(tuple, mask.nonzero().tolist()):
        lp, lq, lt = float(logprobs[i].detach()), float(rollout[i]), float(teacher[i])
        inside = math.exp(lp) - math.exp(lq) >= -0.05
        wanted[i] = -math.exp(lp - lq) * (lt - lp) * inside + 0.1 * (lp - lq) ** 2
    assert_parity(ours, wanted, terms=3)


def test_a_missing_teacher_is_a_nan_loss_and_raises_in_trl() -> None:
    lp = torch.full((1, 2), -1.0, dtype=torch.float64)
    teacher, mask = torch.tensor([[torch.nan, -2.0]], dtype=torch.float64), lp < 0
    assert policy.iw_opd(lp, lp, teacher, mask).loss.isnan().all()
    assert policy.opd(lp, lp, teacher, mask).loss.isnan().tolist() == [[True, False]]
    dead = torch.tensor([[False, True]])
    assert policy.iw_opd(lp, lp, teacher, dead).loss.tolist() == [[0.0, -1.5]]
