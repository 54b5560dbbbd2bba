"""Divergences against the installed GKD, GOLD, IW-OPD, SDPO, server and distillation trainers.

Value and gradient in the student's logits, on drawn logits; no recording between.
"""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.sdpo import loss_utils
from trl.experimental.sdpo.sdpo_trainer import DistillationLogits, SDPOTrainer
from trl.experimental.server_distillation import ServerDistillationTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from composer_plugins.kernels.divergences import jsd
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import betas, logit_pairs, seeds
from parity_tests.support.dialects import kernel
from parity_tests.support.oracles import largest_term
from parity_tests.support.trl_live import Accelerator

Pair = dict[str, Tensor]

pairs = logit_pairs(forbid=False)
temperatures = st.sampled_from([0.7, 1.0, 1.3])
rests = st.sampled_from(["tail", "renormalised"])
few = settings(max_examples=40)
aggregate = kernel("aggregation", "token-mean")
over_rows = kernel("aggregation", "seq-mean-token-mean@trl")


def assert_same(
    ours: Tensor, theirs: Tensor, pair: Pair, temperature: float = 1.0, magnitude: float = 0.0
) -> None:
    """Two losses, and their gradients in the student's logits, up to the rounding of their terms."""
    logits = pair["student_logits"], pair["teacher_logits"]
    magnitude = max(magnitude, largest_term(*logits, temperature) / temperature)
    scale = {"terms": logits[0].numel(), "magnitude": magnitude}
    assert_parity(ours, theirs, **scale)
    mine, want = (torch.autograd.grad(x.sum(), logits[0], retain_graph=True)[0] for x in (ours, theirs))
    assert_parity(mine, want, **scale, what="gradient")


def with_student_gradient(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    return pair["student_logits"].requires_grad_(), pair["teacher_logits"], pair["mask"]


def labels(mask: Tensor) -> Tensor:
    return torch.where(mask, 1, -100)


@pytest.mark.parametrize("upstream", [GKDTrainer, GOLDTrainer, IWOPDTrainer])
@few
@given(pairs, betas, temperatures, st.sampled_from([None, 1.0, 7.0]))
def test_jsd_equals_trl(
    upstream: type, pair: Pair, beta: float, temperature: float, num_items: float | None
) -> None:
    """The mean over unmasked tokens, or their sum / `num_items_in_batch`; an empty batch gives 0."""
    student, teacher, mask = with_student_gradient(pair)
    theirs = upstream.generalized_jsd_loss(
        student, teacher, labels(mask), beta, temperature, num_items_in_batch=num_items
    )
    row = kernel("divergence", "jsd@trl")
    token_loss = row(student, teacher, mask, beta=beta, temperature=temperature).loss
    assert_same(aggregate(token_loss, mask, num_tokens=num_items), theirs, pair, temperature)


@few
@given(pairs, betas)
def test_gkd_without_labels_divides_by_sequences(pair: Pair, beta: float) -> None:
    student, teacher, _ = with_student_gradient(pair)
    everywhere = torch.ones_like(pair["mask"])
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, None, beta)
    token_loss = jsd(student, teacher, everywhere, beta=beta).loss
    assert_same(aggregate(token_loss, everywhere, num_tokens=float(len(everywhere))), theirs, pair)


@few
@given(seeds, betas, temperatures, st.sampled_from([None, 5.0]))
def test_jsd_equals_the_distillation_trainers(
    seed: int, beta: float, temperature: float, num_items: float | None
) -> None:
    assert_distilled("jsd@trl", seed, temperature, num_items, beta=beta)


@few
@given(seeds, temperatures, st.sampled_from([None, 5.0]))
def test_reverse_kl_equals_the_distillation_trainers(
    seed: int, temperature: float, num_items: float | None
) -> None:
    """Its default, which is beta = 1."""
    assert_distilled("reverse_kl@trl", seed, temperature, num_items)


def assert_distilled(row: str, seed: int, temperature: float, num_items: float | None, **ours: float) -> None:
    """TRL goes from hidden states through the head, in float32."""
    g = torch.Generator().manual_seed(seed)
    hidden, teacher_hidden = torch.randn(2, 2, 4, 3, generator=g)
    head, teacher_head = torch.randn(2, 7, 3, generator=g)
    mask = torch.rand(2, 4, generator=g) < 0.7
    hidden.requires_grad_()
    models = (hidden, teacher_hidden, head, teacher_head)
    theirs, _, count = _chunked_divergence_loss(
        *models, mask.long(), ours.get("beta", 1.0), num_items, temperature=temperature
    )
    assert count == mask.sum()
    student, teacher = hidden @ head.T, teacher_hidden @ teacher_head.T
    token_loss = kernel("divergence", row)(student, teacher, mask, temperature=temperature, **ours).loss
    loss = aggregate(token_loss, mask, num_tokens=num_items)
    largest = largest_term(student, teacher, temperature) / temperature
    scale = {"terms": 7 * mask.numel(), "dtype": torch.float32}
    assert_parity(loss, theirs, **scale, magnitude=largest)
    mine, want = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (loss, theirs))
    assert_parity(mine, want, **scale, magnitude=largest * float(head.abs().max()), what="gradient")


def tokens(pair: Pair) -> Tensor:
    """A token per position, any will do."""
    return pair["teacher_logits"].argmin(-1)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def sdpo_loss(
    pair: Pair, mode: str, alpha: float, is_clip: float | None, old: Tensor, **more: int | bool
) -> Tensor:
    """SDPOTrainer's own loss."""
    student, teacher, mask = with_student_gradient(pair)
    options = {"distillation_mode": mode, "distillation_alpha": alpha, "distillation_is_clip": is_clip}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**options, **more),
        accelerator=Accelerator(),
        _log_self_distillation_metric=lambda mode, value: None,
    )
    logits = DistillationLogits(tokens(pair), mask.long(), mask.long(), student, teacher)
    loss: Tensor = SDPOTrainer._compute_self_distillation_loss(
        trainer, SimpleNamespace(training=True), {"old_per_token_logps": old}, logits
    )
    return loss


@pytest.mark.parametrize("mode", ["sampled_token", "full_logits", "renormalised", "tail"])
@few
@given(pairs, betas, st.sampled_from([None, 0.5, 2.0]), st.floats(-30, 30))
def test_sdpo_equals_its_trainer(
    mode: str, pair: Pair, alpha: float, cap: float | None, log_ratio: float
) -> None:
    """A mean over all rows, empty ones too, of token means; weighted by a capped ratio, if there is a cap."""
    student, teacher, mask = with_student_gradient(pair)
    s, t = (token_logprobs(x, tokens(pair)) for x in (student, teacher))
    old = s.detach() - log_ratio * torch.linspace(-1, 1, mask.shape[-1], dtype=torch.float64)
    weighted: dict[str, Any] = {"ratio_cap": cap} | ({} if cap is None else {"old_logprobs": old})
    options: dict[str, Any] = {"alpha": alpha, "student_logprobs": s.detach(), "top_k": None, **weighted}
    largest = float(student.detach().abs().max().clamp(min=1))
    if mode == "sampled_token":
        theirs = sdpo_loss(pair, mode, 1.0, cap, old)
        token_loss = kernel("divergence", "sampled_token@trl")(s, t, mask, **weighted).loss
        largest *= float((s - t).detach().abs().max())
    else:
        if mode == "full_logits":
            theirs = sdpo_loss(pair, mode, alpha, cap, old)
        else:
            largest = rounding(pair, mode)
            options |= {"top_k": (student.shape[-1] + 1) // 2, "rest": mode}
            more = {"distillation_topk": options["top_k"], "distillation_add_tail": mode == "tail"}
            theirs = sdpo_loss(pair, "topk_logits", alpha, cap, old, **more)
        token_loss = kernel("divergence", "sdpo@trl")(student, teacher, mask, **options).loss
    loss = over_rows(token_loss, mask, num_sequences=float(len(mask)))
    assert_same(loss, theirs, pair, magnitude=largest * max(cap or 1, 1))


def rounding(pair: Pair, rest: str) -> float:
    """How large the terms are on a part of the vocabulary.

    A tail of nearly nothing is 1 less nearly 1, rounding alone: such pairs are not compared.
    """
    largest = max(float(pair[name].detach().abs().max()) for name in ("student_logits", "teacher_logits"))
    if rest == "renormalised":
        return 8 * largest
    assume(largest < 5)
    return 1000.0


@few
@given(pairs, betas)
def test_jsd_equals_sdpo_per_token(pair: Pair, alpha: float) -> None:
    student, teacher, mask = with_student_gradient(pair)
    theirs = loss_utils.compute_full_logit_self_distillation_loss(student, teacher, distillation_alpha=alpha)
    assert_same(jsd(student, teacher, mask, beta=alpha).loss, theirs.where(mask, 0.0), pair)


@few
@given(pairs, st.sampled_from([0.0, 1.0]), temperatures, rests)
def test_top_k_equals_iw_opd(pair: Pair, beta: float, temperature: float, rest: str) -> None:
    """Forward KL on the teacher's top k, reverse on the student's; between, TRL takes the union of both."""
    student, teacher, mask = with_student_gradient(pair)
    largest = rounding(pair, rest)
    k = (student.shape[-1] + 1) // 2
    assume(k < student.shape[-1])
    theirs = IWOPDTrainer.generalized_jsd_loss(
        student, teacher, labels(mask), beta, temperature, top_k=k, add_tail=rest == "tail"
    )
    support = {"top_k": k, "top_k_of": "student" if beta else "teacher", "rest": rest}
    token_loss = jsd(student, teacher, mask, beta=beta, temperature=temperature, **support).loss
    assert_same(aggregate(token_loss, mask), theirs, pair, temperature, magnitude=largest)


def server(pair: Pair, rest: str, beta: float) -> tuple[SimpleNamespace, Tensor]:
    """What the server's losses read of a trainer; the student's log-probabilities."""
    trainer = SimpleNamespace(
        beta=beta,
        loss_add_tail=rest == "tail",
        _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss,
    )
    return trainer, torch.log_softmax(pair["student_logits"], -1)


@few
@given(pairs, rests)
def test_forward_kl_topk_equals_trls_server_distillation(pair: Pair, rest: str) -> None:
    student, teacher, mask = with_student_gradient(pair)
    largest = rounding(pair, rest)
    top = torch.log_softmax(teacher, -1).topk((student.shape[-1] + 1) // 2, -1)
    trainer, student_logprobs = server(pair, rest, 0.0)
    theirs = ServerDistillationTrainer._compute_server_forward_kl_loss(
        trainer, {"topk_logprobs": top.values, "topk_token_ids": top.indices}, student_logprobs, labels(mask)
    )
    row = kernel("divergence", "forward_kl_topk@trl")
    token_loss = row(student, top.values, top.indices, mask, rest=rest).loss
    assert_same(aggregate(token_loss, mask), theirs, pair, magnitude=largest)


@few
@given(pairs)
def test_reverse_kl_topk_of_one_token_equals_trls_server_distillation(pair: Pair) -> None:
    """beta = 1: a distribution of two entries, the sampled token and the rest."""
    student, teacher, mask = with_student_gradient(pair)
    assume(student.shape[-1] > 1)
    largest = rounding(pair, "tail")
    ids = tokens(pair)
    given = token_logprobs(teacher, ids)
    trainer, student_logprobs = server(pair, "tail", 1.0)
    theirs = ServerDistillationTrainer._compute_sparse_top_1_divergence_loss(
        *(trainer, student_logprobs, ids, given, ids, given, labels(mask))
    )
    row = kernel("divergence", "reverse_kl_topk@trl")
    token_loss = row(student, given[..., None], ids[..., None], mask, rest="tail").loss
    assert_same(aggregate(token_loss, mask), theirs, pair, magnitude=largest)


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
