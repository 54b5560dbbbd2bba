"""Supports, gates and weights of the divergences, each against plain Python loops."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from composer_plugins.kernels.divergences import (
    adaptive_kl,
    alpha_beta,
    entropy_gated_kl,
    forward_kl,
    forward_kl_topk,
    generalized_reverse_kl_topk,
    jsd,
    reverse_kl,
    reverse_kl_topk,
    sampled_token,
    sdpo,
    skewed_forward_kl,
    symmetric_kl,
    symmetric_kl_topk,
    todi,
    uld,
)
from composer_plugins.kernels.taid import interpolated_logits
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import logit_pairs
from parity_tests.rigs.logits import Pair, scale
from parity_tests.rigs.oracles import cross_entropy, kl, per_token, softmax

Probs = Sequence[float]

examples = settings(max_examples=40)
weights = st.sampled_from([0.1, 0.5, 0.9])
finite_pairs = logit_pairs(forbid=False)


def unmasked(pair: Pair, want: Tensor) -> Tensor:
    return torch.where(pair["mask"], want, 0.0)


def over(pair: Pair, function: Any) -> Tensor:
    return unmasked(pair, per_token(function, pair["student_logits"], pair["teacher_logits"]))


@examples
@given(logit_pairs(), weights)
def test_as_a_cross_entropy_a_forward_kl_is_larger_by_the_entropy_of_the_teacher(
    pair: Pair, weight: float
) -> None:
    entropy = over(pair, lambda _, t: cross_entropy(t, t))
    student = pair["student_logits"].requires_grad_()
    for divergence, share in (
        (forward_kl, 1.0),
        (lambda **x: skewed_forward_kl(**x, skew=weight), 1.0),
        (lambda **x: symmetric_kl(**x, reverse_weight=weight), 1 - weight),
    ):
        as_kl, as_ce = divergence(**pair).loss, divergence(**pair, value="cross-entropy").loss
        assert_parity(as_ce, as_kl + share * entropy, **scale(pair))
        slopes = [torch.autograd.grad(x.sum(), student)[0] for x in (as_kl, as_ce)]
        assert_parity(*slopes, **scale(pair), what="gradient")


def head_of(teacher: Probs, mass: float) -> set[int]:
    order = sorted(range(len(teacher)), key=lambda v: -teacher[v])
    inside = [v for i, v in enumerate(order) if sum(teacher[w] for w in order[: i + 1]) <= mass]
    return {order[0], *inside}


@examples
@given(finite_pairs, st.sampled_from([0.0, 0.5, 0.9]))
def test_adaptive_kl_equals_plain_loops(pair: Pair, mass: float) -> None:
    def want(s: Probs, t: Probs) -> float:
        gap = [abs(a - b) for a, b in zip(s, t, strict=True)]
        on_head = math.fsum(gap[v] for v in head_of(t, mass))
        w = on_head / math.fsum(gap) if any(gap) else 0.5
        return w * kl(t, s) + (1 - w) * kl(s, t)

    # Of two distributions that nearly agree, the weight is a ratio of roundings.
    assert_parity(adaptive_kl(**pair, head_mass=mass).loss, over(pair, want), **scale(pair, 100.0))


@examples
@given(finite_pairs)
def test_the_weight_of_adaptive_kl_is_a_constant_to_its_gradient(pair: Pair) -> None:
    student = pair["student_logits"].requires_grad_()
    ours = adaptive_kl(**pair)
    w = ours.metrics["forward_weight"].value.detach()
    fixed = w * forward_kl(**pair).loss + (1 - w) * reverse_kl(**pair).loss
    slopes = [torch.autograd.grad(x.sum(), student)[0] for x in (ours.loss, fixed)]
    assert_parity(*slopes, **scale(pair), what="gradient")


def test_taids_port_of_akl_weighs_by_other_entries_and_differentiates_the_weight() -> None:
    """Where the teacher's entries stand in order matters to the port and not to the paper."""
    g = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 3, 7, generator=g, dtype=torch.float64)
    mask = torch.ones(3, dtype=torch.bool)
    for weights, keeps in (("paper", True), ("taid", False)):
        straight = adaptive_kl(student, teacher, mask, weights=weights).loss
        flipped = adaptive_kl(student.flip(-1), teacher.flip(-1), mask, weights=weights).loss
        assert torch.allclose(straight, flipped) == keeps


@pytest.mark.parametrize(("left", "counted"), [(2e-7, 2e-7), (1e-8, 1e-7)])
def test_a_small_tail_counts_in_full_down_to_1e_7(left: float, counted: float) -> None:
    """Beyond it, the logarithm of a difference from 1 has lost its digits."""
    teacher = torch.tensor([math.log1p(-left), math.log(left)], dtype=torch.float64)
    student = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    mask = torch.ones(1, dtype=torch.bool)
    loss = forward_kl(student[None], teacher[None], mask, top_k=1, rest="tail").loss
    tail = -math.expm1(-counted) if left < counted else counted
    wanted = (1 - left) * math.log((1 - left) / 0.5) + tail * math.log(tail / 0.5)
    assert abs(float(loss) - wanted) < 1e-13


@pytest.mark.thorough
@examples
@given(finite_pairs, st.integers(1, 9), st.sampled_from(["renormalised", "raw", "tail"]), weights)
def test_given_top_k_equals_that_of_the_logits(pair: Pair, k: int, rest: str, weight: float) -> None:
    student = pair["student_logits"].requires_grad_()
    k = min(k, student.shape[-1])
    top = pair["teacher_logits"].log_softmax(-1).topk(k)
    ids = torch.where(pair["mask"].unsqueeze(-1), top.indices, -7)  # padding
    symmetric = [partial(kernel, reverse_weight=weight) for kernel in (symmetric_kl_topk, symmetric_kl)]
    for given_, whole in ((forward_kl_topk, forward_kl), (reverse_kl_topk, reverse_kl), symmetric):
        ours = given_(student, top.values, ids, pair["mask"], rest=rest)
        want = whole(**pair, top_k=k, rest=rest)
        assert_parity(ours.loss, want.loss, **scale(pair, 1e7 if rest == "tail" else 1.0))
        slopes = [torch.autograd.grad(x.loss.sum(), student, retain_graph=True)[0] for x in (ours, want)]
        assert_parity(*slopes, **scale(pair, 1e7 if rest == "tail" else 1.0), what="gradient")
        mass = unmasked(pair, ours.metrics["teacher_mass"].value)
        assert_parity(mass, unmasked(pair, top.values.exp().sum(-1)), terms=k)


def slopes(pair: Pair, of_entries: Any) -> Tensor:
    """The gradient in the student's logits, of d loss / d S_v as `of_entries(s, t)` lists it."""
    student, teacher = (pair[f"{name}_logits"] for name in ("student", "teacher"))
    found = torch.zeros_like(student)
    for place in pair["mask"].nonzero().tolist():
        s, t = softmax(student[tuple(place)].tolist()), softmax(teacher[tuple(place)].tolist())
        entries = of_entries(s, t)
        mean = math.fsum(a * b for a, b in zip(s, entries, strict=True))
        found[tuple(place)] = found.new_tensor([a * (b - mean) for a, b in zip(s, entries, strict=True)])
    return found


def assert_sum_over_entries(
    ours: Tensor, pair: Pair, value: Any, derivative: Any, magnitude: float = 1.0
) -> None:
    """Value and gradient, by plain loops."""
    assert_parity(ours, over(pair, value), **scale(pair, magnitude))
    (slope,) = torch.autograd.grad(ours.sum(), pair["student_logits"], retain_graph=True)
    assert_parity(slope, slopes(pair, derivative), **scale(pair, magnitude), what="gradient")


EXPONENTS = [(0.5, 0.5), (0.2, 0.7), (1.0, 1.0), (2.0, 0.3), (1.0, 0.0), (0.0, 1.0), (0.4, 0.0), (0.0, 0.4)]


@examples
@given(finite_pairs, st.sampled_from(EXPONENTS))
def test_alpha_beta_and_todi_equal_plain_loops(pair: Pair, exponents: tuple[float, float]) -> None:
    alpha, beta = exponents
    pair["student_logits"].requires_grad_()

    def of_two_exponents(s: Probs, t: Probs) -> float:
        if alpha == 0:
            return math.fsum(
                (a**beta * beta * math.log(a / b) - a**beta + b**beta) / beta**2
                for a, b in zip(s, t, strict=True)
            )
        if beta == 0:
            return math.fsum(
                (b**alpha * alpha * math.log(b / a) - b**alpha + a**alpha) / alpha**2
                for a, b in zip(s, t, strict=True)
            )
        c = alpha + beta
        return -math.fsum(
            b**alpha * a**beta - alpha / c * b**c - beta / c * a**c for a, b in zip(s, t, strict=True)
        ) / (alpha * beta)

    def by_student(s: Probs, t: Probs) -> list[float]:
        if alpha == 0:
            return [a ** (beta - 1) * math.log(a / b) for a, b in zip(s, t, strict=True)]
        return [a ** (beta - 1) * (a**alpha - b**alpha) / alpha for a, b in zip(s, t, strict=True)]

    ours = alpha_beta(**pair, alpha=alpha, beta=beta).loss
    assert_sum_over_entries(ours, pair, of_two_exponents, by_student, 1 / max(alpha * beta, 0.01))

    def mix(a: float, b: float) -> float:
        return b / (a + b)  # sigmoid(log(b / a))

    def mixed_kls(s: Probs, t: Probs) -> float:
        return math.fsum(
            mix(a, b) * b * math.log(b / a) + mix(b, a) * a * math.log(a / b)
            for a, b in zip(s, t, strict=True)
        )

    def with_fixed_mix(s: Probs, t: Probs) -> list[float]:
        return [-mix(a, b) * b / a + mix(b, a) * (math.log(a / b) + 1) for a, b in zip(s, t, strict=True)]

    assert_sum_over_entries(todi(**pair).loss, pair, mixed_kls, with_fixed_mix)


@examples
@given(finite_pairs)
def test_uld_equals_plain_loops(pair: Pair) -> None:
    def sorted_distance(s: Probs, t: Probs) -> float:
        return math.fsum(abs(a - b) for a, b in zip(sorted(s), sorted(t), strict=True))

    def sides(s: Probs, t: Probs) -> list[float]:
        ranks = {v: i for i, v in enumerate(sorted(range(len(s)), key=lambda v: s[v]))}
        return [math.copysign(1.0, a - sorted(t)[ranks[v]]) for v, a in enumerate(s)]

    # Where two sorted probabilities are equal there is no derivative.
    apart = over(pair, lambda s, t: min(abs(a - b) for a, b in zip(sorted(s), sorted(t), strict=True)))
    pair["mask"] = pair["mask"] & (apart > 1e-9)
    pair["student_logits"].requires_grad_()
    assert_sum_over_entries(uld(**pair).loss, pair, sorted_distance, sides)


def test_alpha_beta_at_its_ends_is_a_kl_and_needs_an_exponent() -> None:
    pair = {"student_logits": torch.tensor([[0.1, 1.0, -0.4]]), "teacher_logits": torch.tensor([[1.0, 0, 2]])}
    pair["mask"] = torch.ones(1, dtype=torch.bool)
    for exponents, whole in (((1.0, 0.0), forward_kl), ((0.0, 1.0), reverse_kl)):
        ours = alpha_beta(**pair, alpha=exponents[0], beta=exponents[1]).loss
        assert_parity(ours, whole(**pair).loss, terms=3, dtype=torch.float32, magnitude=3.0)
    for exponents in ((0.0, 0.0), (-0.5, 1.0)):
        with pytest.raises(ValueError, match="neither is negative, and one is above 0"):
            alpha_beta(**pair, alpha=exponents[0], beta=exponents[1])


@examples
@given(finite_pairs, st.integers(1, 9))
def test_generalized_reverse_kl_topk_equals_plain_loops(pair: Pair, k: int) -> None:
    student = pair["student_logits"].requires_grad_()
    k = min(k, student.shape[-1])
    top = pair["teacher_logits"].log_softmax(-1).topk(k)
    ids = torch.where(pair["mask"].unsqueeze(-1), top.indices, -7)  # padding

    def largest(t: Probs) -> list[int]:
        return sorted(range(len(t)), key=lambda v: -t[v])[:k]

    def generalized(s: Probs, t: Probs) -> float:
        return math.fsum(s[v] * math.log(s[v] / t[v]) - s[v] + t[v] for v in largest(t))

    def log_ratios(s: Probs, t: Probs) -> list[float]:
        return [
            math.log(a / b) if v in largest(t) else 0.0 for v, (a, b) in enumerate(zip(s, t, strict=True))
        ]

    ours = generalized_reverse_kl_topk(student, top.values, ids, pair["mask"]).loss
    assert (ours >= 0).all()
    assert_sum_over_entries(ours, pair, generalized, log_ratios)


def test_a_floor_bounds_the_log_probabilities_of_both_sides() -> None:
    student = torch.tensor([[0.0, -9.0, 1.0]], dtype=torch.float64)
    log_t, ids = torch.tensor([[-0.5, -7.0]], dtype=torch.float64), torch.tensor([[0, 1]])
    log_s = student.log_softmax(-1)[0, 0].item()
    mask = torch.ones(1, dtype=torch.bool)
    ours = forward_kl_topk(student, log_t, ids, mask, rest="raw", logprob_floor=-4.0)
    # Of the second entry both are below the floor, and so equal.
    assert ours.loss.item() == pytest.approx(math.exp(-0.5) * (-0.5 - log_s))


def test_a_raw_sum_may_be_negative_and_cut_at_zero_it_has_no_gradient() -> None:
    student = torch.tensor([[3.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    log_t, ids = torch.tensor([[0.5]], dtype=torch.float64).log(), torch.tensor([[0]])
    mask = torch.ones(1, dtype=torch.bool)
    raw = forward_kl_topk(student, log_t, ids, mask, rest="raw").loss
    cut = forward_kl_topk(student, log_t, ids, mask, rest="raw", non_negative=True).loss
    assert raw.item() < 0 and cut.item() == 0
    assert torch.autograd.grad(raw, student)[0].any() and not torch.autograd.grad(cut, student)[0].any()
    low = forward_kl_topk(-student, log_t, ids, mask, rest="raw", value_cap=0.1, logprob_floor=-2.0).loss
    assert low.item() == 0.1
    floored = forward_kl_topk(-student, log_t, ids, mask, rest="raw", logprob_floor=-2.0).loss
    assert floored.item() == pytest.approx(0.5 * (math.log(0.5) + 2))


@examples
@given(logit_pairs(), st.sampled_from([0.0, 0.5, 1.0, 5.0]))
def test_the_gate_is_the_entropy_of_the_teacher(pair: Pair, threshold: float) -> None:
    loss, metrics = entropy_gated_kl(**pair, min_entropy=threshold)
    entropy = over(pair, lambda _, t: cross_entropy(t, t))
    close = (entropy - threshold).abs() <= 1e-9  # rounding decides
    want = torch.where(entropy > threshold, forward_kl(**pair).loss, 0.0)
    assert_parity(torch.where(close, 0.0, loss), torch.where(close, 0.0, want), terms=1)
    assert_parity(metrics["teacher_entropy"].value, entropy, **scale(pair))
    assert torch.equal(
        metrics["gate_frac"].value.bool() | close, (entropy > threshold) & pair["mask"] | close
    )


@examples
@given(finite_pairs, st.sampled_from([None, 0.5, 2.0]))
def test_sdpo_is_a_jsd_times_a_detached_capped_ratio(pair: Pair, cap: float | None) -> None:
    student = pair["student_logits"].requires_grad_()
    s = student.log_softmax(-1)[..., 0]
    old = s.detach() - torch.linspace(-30, 30, s.numel(), dtype=s.dtype).view(s.shape)
    settings = {"top_k": 1, "ratio_cap": cap, "student_logprobs": s}
    loss, metrics = sdpo(**pair, **settings, old_logprobs=old)
    want = (s - old).detach().clamp(-20, 20).exp()
    want = want if cap is None else want.clamp(max=cap)
    assert_parity(torch.where(pair["mask"], metrics["ratio"].value, want), want, terms=30)
    plain = sdpo(**pair, **settings).loss
    assert_parity(loss, plain * metrics["ratio"].value, terms=1)
    slopes = [torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (loss, plain)]
    # The ratio scales the first rounding of a gradient that is itself a difference of larger terms.
    largest = {"terms": student.shape[-1], "magnitude": float(metrics["ratio"].value.max())}
    want = slopes[1] * metrics["ratio"].value.unsqueeze(-1)
    assert_parity(slopes[0], want, **largest, what="gradient")


def test_a_ratio_needs_both_of_its_sides() -> None:
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="pass student_logprobs"):
        sdpo(logits, logits, mask, top_k=1, old_logprobs=torch.zeros(1, 2))


@pytest.mark.parametrize("estimator", ["score", "k2", "k3"])
def test_sampled_estimators_by_their_formulas(estimator: str) -> None:
    s = torch.tensor([-1.0, -2.5, -0.1], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([-2.0, -0.5, -0.1], dtype=torch.float64)
    mask = torch.ones(3, dtype=torch.bool)
    d = (s - t).detach()
    values = {"score": d * s.detach(), "k2": d**2 / 2, "k3": (-d).exp() + d - 1}
    slopes = {"score": d, "k2": d, "k3": 1 - (-d).exp()}
    loss = sampled_token(s, t, mask, estimator=estimator).loss
    assert_parity(loss, values[estimator], terms=1, magnitude=5.0)
    assert_parity(torch.autograd.grad(loss.sum(), s)[0], slopes[estimator], terms=1, magnitude=5.0)
    weighted = sampled_token(s, t, mask, estimator=estimator, old_logprobs=s.detach() - 1, ratio_cap=2.0)
    assert_parity(weighted.loss, 2 * values[estimator], terms=1, magnitude=10.0)


def test_interpolated_logits_start_and_end_and_a_side_without_effect_forbids_nothing() -> None:
    start, end = torch.tensor([[0.0, -math.inf, 2.0]]), torch.tensor([[-math.inf, 1.0, 4.0]])
    assert torch.equal(interpolated_logits(start, end, 0.0), start)
    assert torch.equal(interpolated_logits(start, end, 1.0), end)
    assert torch.equal(interpolated_logits(start, end, 0.25)[0, 2], torch.tensor(2.5))


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (jsd, {"top_k": 4}, r"top_k is 4; it lies in \[1, 3\]"),
        (forward_kl, {"top_k": 0}, r"top_k is 0"),
        (skewed_forward_kl, {"skew": 1.0}, r"in \(0, 1\)"),
        *((jsd, {"beta": beta}, r"in \[0, 1\]") for beta in (-0.1, 1.1, math.nan)),
    ],
)
def test_a_number_outside_its_range_is_refused(kernel: Any, options: dict[str, Any], message: str) -> None:
    logits, mask = torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        kernel(logits, logits, mask, **options)
