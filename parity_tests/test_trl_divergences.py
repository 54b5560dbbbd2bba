"""Divergences against the installed TRL on drawn logits: value and gradient, no recording between.

TRL is called, not copied; what is a method is called with the few attributes of `self` that it reads.
"""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdpo import loss_utils
from trl.experimental.sdpo.sdpo_trainer import DistillationLogits, SDPOTrainer

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.divergences import jsd, sampled_token
from parity_tests.assertions import assert_parity
from parity_tests.oracles import largest_term
from parity_tests.strategies import betas, logit_pairs

Pair = dict[str, Tensor]

pairs = logit_pairs(forbid=False)
temperatures = st.sampled_from([0.7, 1.0, 1.3])


def assert_same(ours: Tensor, theirs: Tensor, pair: Pair, temperature: float = 1.0) -> None:
    """Two losses, and their gradients in the student's logits, up to the rounding of their terms."""
    logits = pair["student_logits"], pair["teacher_logits"]
    scale = {"terms": logits[0].numel(), "magnitude": largest_term(*logits, temperature) / temperature}
    assert_parity(ours, theirs, **scale)
    mine, want = (torch.autograd.grad(x.sum(), logits[0], retain_graph=True)[0] for x in (ours, theirs))
    assert_parity(mine, want, **scale, what="gradient")


def with_student_gradient(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    return pair["student_logits"].requires_grad_(), pair["teacher_logits"], pair["mask"]


def labels(mask: Tensor) -> Tensor:
    return torch.where(mask, 1, -100)


@given(pairs, betas, temperatures, st.sampled_from([None, 1.0, 7.0]))
def test_jsd_equals_gkd(pair: Pair, beta: float, temperature: float, num_items: float | None) -> None:
    """The mean over live tokens, or with `num_items_in_batch` the sum over that; an empty batch gives 0."""
    student, teacher, mask = with_student_gradient(pair)
    theirs = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels(mask), beta, temperature, num_items_in_batch=num_items
    )
    token_loss = jsd(student, teacher, mask, beta=beta, temperature=temperature).loss
    ours = aggregate(token_loss, mask, "token-mean", num_tokens=num_items)
    assert_same(ours, theirs, pair, temperature)


@given(pairs, betas)
def test_gkd_without_labels_divides_by_sequences(pair: Pair, beta: float) -> None:
    student, teacher, _ = with_student_gradient(pair)
    everywhere = torch.ones_like(pair["mask"])
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, None, beta)
    token_loss = jsd(student, teacher, everywhere, beta=beta).loss
    ours = aggregate(token_loss, everywhere, "token-mean", num_tokens=float(len(everywhere)))
    assert_same(ours, theirs, pair)


@given(pairs, betas)
def test_jsd_equals_sdpo_per_token(pair: Pair, alpha: float) -> None:
    student, teacher, mask = with_student_gradient(pair)
    theirs = loss_utils.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
    assert_same(jsd(student, teacher, mask, beta=alpha).loss, theirs.where(mask, 0.0), pair)


def tokens(pair: Pair) -> Tensor:
    """A token per position, any will do."""
    return pair["teacher_logits"].argmin(-1)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


@given(pairs)
def test_sampled_token_equals_sdpo_per_token(pair: Pair) -> None:
    student, teacher, mask = with_student_gradient(pair)
    ids = tokens(pair)
    theirs = loss_utils.compute_sampled_token_self_distillation_loss(
        student, teacher, ids, distillation_alpha=1.0
    )
    s, t = token_logprobs(student, ids), token_logprobs(teacher, ids)
    ours = sampled_token(s, t, mask).loss
    (mine,) = torch.autograd.grad(ours.sum(), student)
    (want,) = torch.autograd.grad(theirs.where(mask, 0.0).sum(), student)
    # TRL takes a logit less a log-sum: the difference may be far smaller than what is rounded.
    log_ratio = (s - t).detach().abs().max()
    magnitude = float((student.detach().abs().max() * log_ratio).clamp(min=1))
    scale = {"terms": student.shape[-1], "magnitude": magnitude}
    assert_parity(ours, theirs.where(mask, 0.0), **scale)
    assert_parity(mine, want, **scale, what="gradient")


@given(pairs, betas, st.sampled_from([None, 0.5, 2.0]), st.floats(-30, 30))
def test_weighted_jsd_over_every_row_equals_sdpo(
    pair: Pair, alpha: float, is_clip: float | None, log_ratio: float
) -> None:
    """SDPO in TRL is a mean over all rows, the empty ones too, of token means; weighted, if clipped."""
    student, teacher, mask = with_student_gradient(pair)
    logprobs = token_logprobs(student, tokens(pair)).detach()
    old = logprobs - log_ratio * torch.linspace(-1, 1, mask.shape[-1], dtype=torch.float64)
    settings = {"distillation_mode": "full_logits", "distillation_alpha": alpha}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**settings, distillation_is_clip=is_clip),
        accelerator=SimpleNamespace(gather=lambda x: x),
        _log_self_distillation_metric=lambda mode, value: None,
    )
    theirs = SDPOTrainer._compute_self_distillation_loss(
        trainer,
        SimpleNamespace(training=True),
        {"old_per_token_logps": old},
        DistillationLogits(tokens(pair), mask.long(), mask.long(), student, teacher),
    )
    token_loss = jsd(student, teacher, mask, beta=alpha).loss
    if is_clip is not None:
        token_loss = token_loss * (logprobs - old).clamp(-20, 20).exp().clamp(max=is_clip)
    ours = aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=float(len(mask)))
    assert_same(ours, theirs, pair)


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
