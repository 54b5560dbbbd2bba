"""Where divergences differ on purpose from the installed GKD trainer."""

import pytest
import torch
from trl.experimental.gkd import GKDTrainer

from composer_plugins.conformance.trl_claims.upstream import labels
from composer_plugins.kernels.divergences import jsd
from composer_plugins.testing.assertions import assert_parity


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
