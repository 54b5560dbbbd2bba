"""Divergences against the installed GKD, GOLD, IW-OPD, SDPO, server and distillation trainers.

Value and gradient in the student's logits, on drawn logits; no recording between.
"""

import hypothesis.strategies as st
import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.trl_claims import distillation
from composer_plugins.conformance.trl_claims.divergences import CLAIMS
from composer_plugins.conformance.trl_claims.upstream import labels
from composer_plugins.kernels.divergences import jsd
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.claims import check, proves


@proves(CLAIMS, "jsd@trl")
def test_jsd_equals_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "reverse_kl@trl")
def test_reverse_kl_equals_the_distillation_trainers(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(distillation.CLAIMS, "sdpo@trl", "sampled_token@trl")
def test_sdpo_equals_its_trainer(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(distillation.CLAIMS, "jsd")
def test_jsd_equals_sdpo_per_token(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "forward_kl_topk@trl")
def test_forward_kl_topk_equals_trls_server_distillation(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


@proves(CLAIMS, "reverse_kl_topk@trl")
def test_reverse_kl_topk_of_one_token_equals_trls_server_distillation(
    claim: Claim, data: st.DataObject
) -> None:
    check(claim, data)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_entry_forbidden_by_both_is_nan_in_trl_and_nothing_here(beta: float) -> None:
    """So that a padded vocabulary or a grammar mask does not end the run."""
    student = torch.tensor([[[-torch.inf, 0.5, -0.3]]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[[-torch.inf, -0.1, 0.2]]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert GKDTrainer.generalized_jsd_loss(student, teacher, labels(mask), beta).isnan()
    ours = jsd(student, teacher, mask, beta=beta).loss.sum()
    theirs = GKDTrainer.generalized_jsd_loss(student[..., 1:], teacher[..., 1:], labels(mask), beta)
    assert_parity(ours, theirs, terms=3, magnitude=1.0)
    (slope,) = torch.autograd.grad(ours, student)
    (want,) = torch.autograd.grad(theirs, student)
    assert_parity(slope, want, terms=3, magnitude=1.0, what="gradient")


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_bfloat16_divergence_is_rounded_in_trl_and_not_here(beta: float) -> None:
    """TRL takes log_softmax in the dtype of the logits: a small divergence drowns, or turns negative."""
    g = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(1, 8, 1000, generator=g)
    teacher = (student + 0.02 * torch.randn(1, 8, 1000, generator=g)).bfloat16()
    student, mask = student.bfloat16(), torch.ones(1, 8, dtype=torch.bool)
    exact = jsd(student.double(), teacher.double(), mask, beta=beta).loss.mean()
    ours = jsd(student, teacher, mask, beta=beta).loss.mean()
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels(mask), beta)
    assert ours.item() == pytest.approx(exact.item(), rel=1e-2)
    assert theirs.item() != pytest.approx(exact.item(), rel=0.5)
