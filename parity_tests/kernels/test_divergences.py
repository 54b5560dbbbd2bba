"""What a divergence is, whoever implements it: properties, hazards and a second opinion in loops.

`beta` in {0, 1} is the forward and the reverse KL, so each test over `betas` is one of all three.
"""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.divergences import forward_kl, jsd, reverse_kl, sampled_token
from parity_tests.support.assertions import assert_parity, tolerance
from parity_tests.support.oracles import generalized_jsd, kl, largest_term, per_token
from parity_tests.support.strategies import betas, logit_pairs

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]
Pair = dict[str, Tensor]

each_beta = pytest.mark.parametrize("beta", BETAS)


def scale(pair: Pair) -> dict[str, float]:
    """What the sum over the vocabulary is made of: how many terms, and how large."""
    student, teacher = pair["student_logits"], pair["teacher_logits"]
    return {"terms": student.shape[-1], "magnitude": largest_term(student, teacher)}


def rounding(pair: Pair) -> float:
    """How far from 0 the divergence of two equal distributions may be."""
    return tolerance(torch.float64, **scale(pair))


def gradient(pair: Pair, **settings: float) -> Tensor:
    """The gradient of the summed loss in the student's logits."""
    student = pair["student_logits"].clone().requires_grad_()
    loss = jsd(student, pair["teacher_logits"], pair["mask"], **settings).loss
    return torch.autograd.grad(loss.sum(), student)[0]


def example(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Pair:
    """A fixed pair of logits, all positions live."""
    g = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, *shape, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.ones(shape[:-1], dtype=torch.bool)
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask}


@given(logit_pairs(), betas)
def test_jsd_equals_plain_loops(pair: Pair, beta: float) -> None:
    loss = jsd(**pair, beta=beta).loss
    student, teacher = pair["student_logits"], pair["teacher_logits"]
    want = per_token(lambda s, t: generalized_jsd(s, t, beta), student, teacher)
    assert_parity(loss, torch.where(pair["mask"], want, 0.0), **scale(pair))


def test_forward_kl_weighs_by_the_teacher_and_reverse_kl_by_the_student() -> None:
    student, teacher = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]).double()
    pair = {"student_logits": student.log()[None], "teacher_logits": teacher.log()[None]}
    mask = torch.ones(1, dtype=torch.bool)
    forward = 0.2 * math.log(0.2 / 0.5) + 0.3 * math.log(0.3 / 0.25) + 0.5 * math.log(0.5 / 0.25)
    reverse = 0.5 * math.log(0.5 / 0.2) + 0.25 * math.log(0.25 / 0.3) + 0.25 * math.log(0.25 / 0.5)
    for one in (forward_kl(**pair, mask=mask), jsd(**pair, mask=mask, beta=0.0)):
        assert one.loss.item() == pytest.approx(forward, rel=1e-6)
    for one in (reverse_kl(**pair, mask=mask), jsd(**pair, mask=mask, beta=1.0)):
        assert one.loss.item() == pytest.approx(reverse, rel=1e-6)


def test_a_swap_of_beta_and_one_minus_beta_is_seen() -> None:
    """At the default, 0.5, it is not: hence 0.1 and 0.9 among the betas of every test."""
    pair = example(2, 3, 7)
    logits = pair["student_logits"], pair["teacher_logits"]
    swapped = per_token(lambda s, t: generalized_jsd(s, t, 0.9), *logits)
    assert not torch.allclose(jsd(**pair, beta=0.1).loss, swapped, rtol=1e-2)
    assert torch.allclose(jsd(**pair, beta=0.9).loss, swapped)


@given(logit_pairs(), betas)
def test_divergence_is_not_negative_and_jsd_has_its_bound(pair: Pair, beta: float) -> None:
    loss = jsd(**pair, beta=beta).loss
    assert (loss >= -rounding(pair)).all()
    if 0 < beta < 1:  # the entropy of the choice between the two: bits sent when they are disjoint
        bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert (loss <= bound + rounding(pair)).all()


@given(logit_pairs(), betas)
def test_divergence_and_gradient_are_zero_where_student_is_teacher(pair: Pair, beta: float) -> None:
    pair["teacher_logits"] = pair["student_logits"]
    assert (jsd(**pair, beta=beta).loss.abs() <= rounding(pair)).all()
    assert (gradient(pair, beta=beta).abs() <= rounding(pair)).all()


@given(logit_pairs(), betas.filter(lambda beta: 0 < beta < 1))
def test_jsd_is_symmetric_under_a_swap_of_models_and_weights(pair: Pair, beta: float) -> None:
    swapped = jsd(pair["teacher_logits"], pair["student_logits"], pair["mask"], beta=1 - beta)
    assert_parity(jsd(**pair, beta=beta).loss, swapped.loss, **scale(pair))


@given(logit_pairs(), betas)
def test_teacher_gets_no_gradient(pair: Pair, beta: float) -> None:
    student, teacher = (pair[f"{name}_logits"].requires_grad_() for name in ("student", "teacher"))
    loss = (
        jsd(**pair, beta=beta).loss.sum()
        + sampled_token(student[..., 0], teacher[..., 0], pair["mask"]).loss.sum()
    )
    _, none = torch.autograd.grad(loss, (student, teacher), allow_unused=True)
    assert none is None


@given(logit_pairs(), betas)
def test_masked_positions_give_exactly_zero_whatever_they_hold(pair: Pair, beta: float) -> None:
    masked = ~pair["mask"]
    student, teacher = pair["student_logits"].clone(), pair["teacher_logits"].clone()
    clean = jsd(**pair, beta=beta).loss
    for poison in (math.nan, math.inf, -math.inf):
        student[masked], teacher[masked] = poison, -poison
        dirty = {**pair, "student_logits": student, "teacher_logits": teacher}
        loss = jsd(**dirty, beta=beta).loss
        assert torch.equal(loss, clean) and not loss[masked].any()
        slope = gradient(dirty, beta=beta)
        assert slope.isfinite().all() and not slope[masked].any()


@each_beta
@pytest.mark.parametrize("name", ["student_logits", "teacher_logits"])
def test_nan_at_a_live_position_gives_nan_there_alone(name: str, beta: float) -> None:
    pair = example(2, 3, 5)
    pair[name][1, 2, 3] = math.nan
    where = torch.zeros(2, 3, dtype=torch.bool)
    where[1, 2] = True
    assert torch.equal(jsd(**pair, beta=beta).loss.isnan(), where)


@given(logit_pairs(), betas)
def test_what_both_forbid_might_as_well_not_be_there(pair: Pair, beta: float) -> None:
    forbidden = torch.full_like(pair["student_logits"][..., :1], -math.inf)
    wider = {name: torch.cat([x, forbidden], -1) if "logits" in name else x for name, x in pair.items()}
    assert_parity(jsd(**wider, beta=beta).loss, jsd(**pair, beta=beta).loss, **scale(pair))
    slope = gradient(wider, beta=beta)
    assert slope.isfinite().all() and not slope[..., -1].any()


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


@each_beta
def test_vocabulary_of_one_token_gives_zero(beta: float) -> None:
    pair = example(2, 3, 1)
    assert (jsd(**pair, beta=beta).loss.abs() <= rounding(pair)).all()
    assert not gradient(pair, beta=beta).any()


@each_beta
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(half: torch.dtype, beta: float) -> None:
    pair = example(2, 3, 11, dtype=half)
    upcast = {name: x.float() if "logits" in name else x for name, x in pair.items()}
    loss = jsd(**pair, beta=beta).loss
    assert loss.dtype == torch.float32
    assert torch.equal(loss, jsd(**upcast, beta=beta).loss)
    assert torch.equal(gradient(pair, beta=beta), gradient(upcast, beta=beta).to(half))


@each_beta
def test_temperature_divides_the_logits_and_does_nothing_else(beta: float) -> None:
    pair = example(2, 3, 7)
    divided = {name: x / 0.7 if "logits" in name else x for name, x in pair.items()}
    assert torch.equal(jsd(**pair, beta=beta, temperature=0.7).loss, jsd(**divided, beta=beta).loss)


@given(logit_pairs(), betas)
def test_order_of_the_vocabulary_does_not_matter(pair: Pair, beta: float) -> None:
    flipped = {name: x.flip(-1) if "logits" in name else x for name, x in pair.items()}
    assert_parity(jsd(**flipped, beta=beta).loss, jsd(**pair, beta=beta).loss, **scale(pair))


@each_beta
def test_gradient_is_that_of_finite_differences(beta: float) -> None:
    pair = example(2, 2, 4)
    pair["mask"][0, 1] = False
    student = pair["student_logits"].requires_grad_()
    rest = pair["teacher_logits"], pair["mask"]
    assert torch.autograd.gradcheck(lambda s: jsd(s, *rest, beta=beta, temperature=0.9).loss, student)


@each_beta
def test_packed_sequence_is_a_padded_batch_without_rows(beta: float) -> None:
    pair = example(4, 7)
    packed = jsd(**pair, beta=beta).loss
    assert packed.shape == (4,)
    assert torch.equal(packed, jsd(**{name: x[None] for name, x in pair.items()}, beta=beta).loss[0])


@each_beta
def test_empty_mask_gives_zero_with_a_gradient(beta: float) -> None:
    pair = example(2, 3, 5)
    pair["mask"][:] = False
    assert not jsd(**pair, beta=beta).loss.any()
    assert not gradient(pair, beta=beta).any()


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_outside_the_unit_interval_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        jsd(**example(1, 2), beta=beta)


@given(logit_pairs(forbid=False))
def test_sampled_token_has_the_gradient_of_reverse_kl_in_expectation(pair: Pair) -> None:
    """Every token is drawn once, and weighted by its chance: sum_y S(y) grad x(y)."""
    logits = pair["student_logits"].requires_grad_()
    vocab = logits.shape[-1]
    s, t = (torch.log_softmax(pair[f"{name}_logits"], -1) for name in ("student", "teacher"))
    drawn = sampled_token(s.movedim(-1, 0), t.movedim(-1, 0), pair["mask"].expand(vocab, -1, -1))
    expected = (s.detach().exp().movedim(-1, 0) * drawn.loss).sum()
    (slope,) = torch.autograd.grad(expected, logits)
    assert_parity(
        slope, gradient(pair, beta=1.0), terms=vocab, magnitude=largest_term(logits, pair["teacher_logits"])
    )


@given(logit_pairs(forbid=False))
def test_sampled_token_metric_estimates_reverse_kl(pair: Pair) -> None:
    s, t = (torch.log_softmax(pair[f"{name}_logits"], -1) for name in ("student", "teacher"))
    vocab = s.shape[-1]
    metric = sampled_token(s.movedim(-1, 0), t.movedim(-1, 0), pair["mask"].expand(vocab, -1, -1)).metrics[
        "kl"
    ]
    expected = (s.exp().movedim(-1, 0) * metric.value).sum(0)
    want = per_token(kl, pair["student_logits"], pair["teacher_logits"])
    assert torch.equal(metric.where[0], pair["mask"])
    assert_parity(
        expected,
        torch.where(pair["mask"], want, 0.0),
        terms=vocab,
        magnitude=largest_term(pair["student_logits"], pair["teacher_logits"]),
    )


def test_sampled_token_is_zero_where_masked_and_nan_where_live() -> None:
    student = torch.tensor([math.nan, -math.inf, -1.0, math.nan]).requires_grad_()
    teacher = torch.tensor([-1.0, -math.inf, -2.0, -1.0])
    mask = torch.tensor([False, False, True, True])
    loss = sampled_token(student, teacher, mask).loss
    (slope,) = torch.autograd.grad(loss.sum(), student)
    assert torch.equal(loss[:3], torch.tensor([0.0, 0.0, -1.0])) and loss[3].isnan()
    assert torch.equal(slope[:3], torch.tensor([0.0, 0.0, 1.0]))


def test_sampled_token_is_computed_in_float32() -> None:
    student, teacher = (torch.tensor([x], dtype=torch.bfloat16) for x in (-1.3, -2.7))
    mask = torch.ones(1, dtype=torch.bool)
    loss = sampled_token(student, teacher, mask).loss
    assert loss.dtype == torch.float32
    assert torch.equal(loss, sampled_token(student.float(), teacher.float(), mask).loss)
