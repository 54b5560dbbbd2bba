"""What a divergence is, whoever implements it: properties, hazards and a second opinion in loops.

`beta` in {0, 1} is the forward and the reverse KL, so each test over `betas` is one of all three.
"""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.divergences import forward_kl, jsd, reverse_kl, sampled_token
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import betas, logit_pairs
from parity_tests.rigs.logits import Pair, each_beta, example, scale
from parity_tests.rigs.oracles import generalized_jsd, kl, per_token


def gradient(pair: Pair, **settings: float) -> Tensor:
    """The gradient of the summed loss in the student's logits."""
    student = pair["student_logits"].clone().requires_grad_()
    loss = jsd(student, pair["teacher_logits"], pair["mask"], **settings).loss
    return torch.autograd.grad(loss.sum(), student)[0]


@given(logit_pairs(), betas)
def test_jsd_equals_plain_loops(pair: Pair, beta: float) -> None:
    loss = jsd(**pair, beta=beta).loss
    student, teacher = pair["student_logits"], pair["teacher_logits"]
    want = per_token(lambda s, t: generalized_jsd(s, t, beta), student, teacher)
    assert_parity(loss, torch.where(pair["mask"], want, 0.0), **scale(pair))


@given(logit_pairs())
def test_the_ends_of_jsd_are_the_forward_and_the_reverse_kl(pair: Pair) -> None:
    for divergence, beta in ((forward_kl, 0.0), (reverse_kl, 1.0)):
        assert torch.equal(divergence(**pair).loss, jsd(**pair, beta=beta).loss)


@each_beta
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [-math.inf, "min"])
def test_one_side_alone_may_forbid(padding: float | str, dtype: torch.dtype, beta: float) -> None:
    """Vocabularies are padded with -inf by one model and with the smallest float by another."""
    lowest = torch.finfo(dtype).min if padding == "min" else padding
    pair = example(2, 5, dtype=dtype)
    for name, other in (("student_logits", "teacher_logits"), ("teacher_logits", "student_logits")):
        one_sided = {**pair, name: pair[name].clone(), other: pair[other].clone()}
        one_sided[name][:, 0] = -math.inf
        loss = jsd(**one_sided, beta=beta).loss
        infinite = beta == (0 if name == "student_logits" else 1)
        assert loss.isinf().all() if infinite else loss.isfinite().all()
        one_sided[other][:, 0] = lowest
        assert jsd(**one_sided, beta=beta).loss.isfinite().all()
        assert gradient(one_sided, beta=beta).isfinite().all()


@given(logit_pairs(forbid=False))
def test_sampled_token_has_the_gradient_of_reverse_kl_in_expectation(pair: Pair) -> None:
    """And its metric the value: every token is drawn once, and weighted by its chance."""
    logits = pair["student_logits"].requires_grad_()
    vocab = logits.shape[-1]
    s, t = (torch.log_softmax(pair[f"{name}_logits"], -1) for name in ("student", "teacher"))
    drawn = sampled_token(s.movedim(-1, 0), t.movedim(-1, 0), pair["mask"].expand(vocab, -1, -1))
    chances = s.detach().exp().movedim(-1, 0)
    (slope,) = torch.autograd.grad((chances * drawn.loss).sum(), logits)
    assert_parity(slope, gradient(pair, beta=1.0), **scale(pair))
    value, where = drawn.metrics["kl"]
    want = per_token(kl, logits, pair["teacher_logits"])
    assert torch.equal(where[0], pair["mask"])
    assert_parity((chances * value).sum(0), torch.where(pair["mask"], want, 0.0), **scale(pair), what="kl")
