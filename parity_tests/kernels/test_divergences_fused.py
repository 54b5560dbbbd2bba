"""The one-pass divergence over a whole vocabulary: against autograd, however it is cut, and only once."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.divergences import fused, jsd, summands, supports
from composer_plugins.kernels.divergences.supports import log_probs, with_rest
from composer_plugins.kernels.masking import keep
from composer_plugins.testing.assertions import assert_parity, largest_term
from composer_plugins.testing.strategies import betas, logit_pairs
from parity_tests.rigs import logits as rig
from parity_tests.rigs.logits import Pair, each_beta, scale
from parity_tests.rigs.oracles import cross_entropy, per_token


def plain(student: Tensor, teacher: Tensor, mask: Tensor, beta: float, temperature: float) -> Tensor:
    """By autograd, from the summands that the cut supports use."""
    pair = log_probs(student, teacher, mask, temperature)
    return keep(summands.total(summands.jsd(pair.student, pair.teacher, beta)), mask)


def value_and_gradient(function: Any, pair: Pair, *settings: float) -> tuple[Tensor, Tensor]:
    student = pair["student_logits"].clone().requires_grad_()
    loss = function(student, pair["teacher_logits"], pair["mask"], *settings)
    weights = torch.linspace(-2, 3, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, student, weights)[0]


def one_pass(student: Tensor, teacher: Tensor, mask: Tensor, beta: float, temperature: float) -> Tensor:
    return fused.generalized_jsd(student, teacher, mask, beta=beta, temperature=temperature)


def example(*shape: int) -> Pair:
    pair = rig.example(*shape)
    pair["mask"].view(-1)[1:2] = False
    return pair


@settings(max_examples=60)
@given(logit_pairs(), betas)
def test_one_pass_equals_autograd(pair: Pair, beta: float) -> None:
    ours, want = (value_and_gradient(f, pair, beta, 0.7) for f in (one_pass, plain))
    logits = pair["student_logits"], pair["teacher_logits"]
    scale = {"terms": logits[0].shape[-1], "magnitude": 3 * largest_term(*logits, 0.7) / 0.7}
    assert_parity(ours[0], want[0], **scale)
    assert_parity(ours[1], want[1], **scale, what="gradient")


@settings(max_examples=60)
@given(logit_pairs(), betas, st.data())
def test_a_top_k_equals_autograd_on_the_k_largest_entries(
    pair: Pair, beta: float, data: st.DataObject
) -> None:
    """Whatever k is: of a k above half the vocabulary, the others are left out instead."""
    vocab = pair["student_logits"].shape[-1]
    k = data.draw(st.integers(1, vocab), label="k")
    of = data.draw(st.sampled_from(["teacher", "student"]), label="top_k_of")
    rest = data.draw(st.sampled_from(["renormalised", "raw", "tail"]), label="rest")

    def largest(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        s, t = (torch.where(mask.unsqueeze(-1), x, 0.0).log_softmax(-1) for x in (student, teacher))
        ids = (s if of == "student" else t).topk(k, -1).indices
        s, t = with_rest(supports.Pair(s.gather(-1, ids), t.gather(-1, ids)), rest)
        return keep(summands.total(summands.jsd(s, t, beta)), mask)

    def ours(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return jsd(student, teacher, mask, beta=beta, top_k=k, top_k_of=of, rest=rest).loss

    one, want = (value_and_gradient(f, pair) for f in (ours, largest))
    assert_parity(one[0], want[0], **scale(pair, 3.0))
    assert_parity(one[1], want[1], **scale(pair, 3.0), what="gradient")


@each_beta
@pytest.mark.parametrize("shape", [(5, 7, 11), (7, 11), (2, 3, 4, 11), (9, 1, 11), (1, 13, 11), (0, 3, 11)])
def test_how_it_is_cut_does_not_matter(
    shape: tuple[int, ...], beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that divide neither rows nor tokens; and a slice of the tokens, as next-token logits are."""
    pair = example(*shape)
    want = value_and_gradient(one_pass, pair, beta, 1.0)
    for elements in (1, 23, 34, 80, 1000):
        monkeypatch.setattr(fused, "CPU_TILE", elements)
        ours = value_and_gradient(one_pass, pair, beta, 1.0)
        assert torch.equal(ours[0], want[0]) and torch.equal(ours[1], want[1])
        entropy = fused.entropy(pair["teacher_logits"], pair["mask"], temperature=1.0)
        by_loops = per_token(lambda p: cross_entropy(p, p), pair["teacher_logits"])
        assert_parity(entropy, keep(by_loops, pair["mask"]), terms=11, magnitude=1.0)
        sliced = {name: x[..., :-1, :] if "logits" in name else x[..., :-1] for name, x in pair.items()}
        copied = {name: x.contiguous() for name, x in sliced.items()}
        a, b = (value_and_gradient(one_pass, one, beta, 1.0) for one in (sliced, copied))
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@each_beta
def test_an_underflowing_probability_adds_nothing(beta: float) -> None:
    """Logits 200 apart: exp(-200) is 0 in float32, whose logarithm is still a number."""
    student = torch.tensor([[0.0, 0.5, -200.0, -math.inf]], requires_grad=True)
    teacher = torch.tensor([[0.5, 0.0, -300.0, -math.inf]])
    mask = torch.ones(1, dtype=torch.bool)
    loss = one_pass(student, teacher, mask, beta, 1.0)
    short = one_pass(student[:, :2], teacher[:, :2], mask, beta, 1.0)
    assert_parity(loss, short, terms=4, dtype=torch.float32, magnitude=1.0)
    (slope,) = torch.autograd.grad(loss.sum(), student)
    assert slope.isfinite().all() and not slope[:, 2:].any()


def test_a_second_derivative_raises() -> None:
    """Silently it would be 0: what is kept of the first pass is a number and not a function."""
    pair = example(2, 3, 4)
    student = pair["student_logits"].requires_grad_()
    rest = pair["teacher_logits"], pair["mask"], 0.5, 1.0
    (slope,) = torch.autograd.grad(one_pass(student, *rest).sum(), student, create_graph=True)
    penalised = one_pass(student, *rest).sum() + slope.square().sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        penalised.backward()
    cut = jsd(student, *rest[:2], top_k=2).loss.sum()
    (slope,) = torch.autograd.grad(cut, student, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        slope.square().sum().backward()
    slope_of = torch.func.grad(lambda s: one_pass(s, *rest).sum())
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.func.grad(lambda s: slope_of(s).square().sum())(pair["student_logits"])


def test_it_keeps_one_tensor_of_the_vocabulary_for_the_backward() -> None:
    """Autograd's own formula keeps many; of an evaluation nothing is kept at all."""
    pair = example(8, 4, 100)
    vocabulary, kept = pair["student_logits"].numel(), []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    student = pair["student_logits"].requires_grad_()
    rest = pair["teacher_logits"], pair["mask"], 0.5, 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        one_pass(student, *rest)
        assert [n for n in kept if n >= vocabulary] == [vocabulary]
        kept.clear()
        plain(student, *rest)
        assert sum(n >= vocabulary for n in kept) > 8
        kept.clear()
        with torch.no_grad():
            one_pass(student, *rest)
        assert not kept


@pytest.mark.parametrize(("half", "kept"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_a_loss_scale_comes_in_time_for_float16(half: torch.dtype, kept: torch.dtype) -> None:
    """A gradient of 1e-9 is 0 in float16, and scaled by 2^16 it is not."""
    student = torch.tensor([[0.0, -19.0]], dtype=half, requires_grad=True)
    teacher = torch.tensor([[0.0, -18.0]], dtype=half)
    loss = one_pass(student, teacher, torch.ones(1, dtype=torch.bool), 0.0, 1.0)
    (slope,) = torch.autograd.grad(loss.sum() * 2.0**16, student)
    exact = 2.0**16 * (math.exp(-19) - math.exp(-18))
    assert slope.dtype == half
    assert slope[0, 1].item() == pytest.approx(exact, rel=torch.finfo(torch.bfloat16).eps)
    assert kept == (torch.float32 if half == torch.float16 else half)
