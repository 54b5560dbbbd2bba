"""TAID's loss at a fixed t, against upstream's recording and by its definition."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.taid import taid
from composer_plugins.testing.assertions import assert_parity, largest_term
from composer_plugins.testing.strategies import logit_pairs
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.oracles import cross_entropy, kl, per_token

Pair = dict[str, Tensor]
ts = st.sampled_from([0.0, 0.3, 0.75, 1.0])


def recorded(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Student's logits, our loss and its gradient for one case: upstream's token mean."""
    dtype = golden.dtype(case)
    student = golden.tensor(case["student_logits"], dtype).requires_grad_()
    teacher, mask = golden.tensor(case["teacher_logits"], dtype), torch.tensor(case["mask"]).bool()
    upstreams = reductions.kernel("divergence", "taid@taid")
    loss = aggregate(upstreams(student, teacher, mask, t=case["t"]).loss, mask, "token-mean")
    return student, loss, torch.autograd.grad(loss, student)[0]


@claim("taid_loss", where=lambda case: case["loss"] != "nan")
def test_taid_equals_upstream(case: Case) -> None:
    student, loss, gradient = recorded(case)
    teacher = golden.tensor(case["teacher_logits"], student.dtype)
    # At t = 0, and where the models agree, the gradient is the rounding of terms that cancel.
    cancels = case["t"] == 0 or torch.equal(student, teacher)
    magnitude = largest_term(student, teacher) if cancels else None
    scale = {"terms": student.shape[-1], "dtype": student.dtype}
    assert_parity(loss, golden.tensor(case["loss"]), **scale)
    want = golden.tensor(case["grad_student"])
    assert_parity(gradient, want, **scale, magnitude=magnitude, what="gradient")


@claim("taid_loss", where=lambda case: case["loss"] == "nan")
def test_empty_batch_is_zero_where_upstream_is_nan(case: Case) -> None:
    _, loss, gradient = recorded(case)
    assert not torch.tensor(case["mask"]).any()
    assert not loss and not gradient.any()


def scale(pair: Pair) -> dict[str, float]:
    """What the sum over the vocabulary is made of: how many terms, and how large."""
    student, teacher = pair["student_logits"], pair["teacher_logits"]
    return {"terms": student.shape[-1], "magnitude": largest_term(student, teacher)}


def gradient(pair: Pair, t: float) -> Tensor:
    """The gradient of the summed loss in the student's logits."""
    student = pair["student_logits"].clone().requires_grad_()
    loss = taid(student, pair["teacher_logits"], pair["mask"], t=t).loss
    return torch.autograd.grad(loss.sum(), student)[0]


def mixed_logits(pair: Pair, t: float) -> Tensor:
    """The intermediate teacher; an entry that both forbid stays forbidden, but 0 * -inf is NaN."""
    student, teacher = (pair[f"{name}_logits"].clamp(min=-1e9) for name in ("student", "teacher"))
    return (1 - t) * student + t * teacher


@given(logit_pairs(), ts)
def test_loss_and_its_kl_equal_plain_loops(pair: Pair, t: float) -> None:
    """Mixed in LOGIT space: mixing the probabilities gives other numbers."""
    mixed, student, mask = mixed_logits(pair, t), pair["student_logits"], pair["mask"]
    loss, metrics = taid(**pair, t=t)
    want = torch.where(mask, per_token(cross_entropy, mixed, student), 0.0)
    assert_parity(loss, want, **scale(pair))
    want = torch.where(mask, per_token(kl, mixed, student), 0.0)
    assert_parity(torch.where(mask, metrics["kl"].value, 0.0), want, **scale(pair), what="kl")
    assert torch.equal(metrics["kl"].where, mask)


@given(logit_pairs(), ts)
def test_gradient_is_student_less_intermediate_teacher(pair: Pair, t: float) -> None:
    """Which it is only if the student's side of the mixture is detached."""
    want = torch.softmax(pair["student_logits"], -1) - torch.softmax(mixed_logits(pair, t), -1)
    assert_parity(gradient(pair, t), torch.where(pair["mask"][..., None], want, 0.0), **scale(pair))


def example(dtype: torch.dtype = torch.float64) -> Pair:
    g = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 3, 5, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.ones(2, 3, dtype=torch.bool)
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask}


each_t = pytest.mark.parametrize("t", [0.0, 0.3, 1.0])


@each_t
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["student_logits", "teacher_logits"])
def test_what_one_side_forbids_has_no_part_in_the_mixture(name: str, dtype: torch.dtype, t: float) -> None:
    """As -inf or as the smallest float: vocabularies are padded with either."""
    pair = example(dtype)
    (other,) = {"student_logits", "teacher_logits"} - {name}
    pair[name][..., 0] = -math.inf
    pair[other][..., 0] = torch.finfo(dtype).min
    loss = taid(**pair, t=t).loss
    without = {key: x[..., 1:] if "logits" in key else x for key, x in pair.items()}
    assert torch.allclose(loss, taid(**without, t=t).loss)
    slope = gradient(pair, t)
    assert slope.isfinite().all() and not slope[..., 0].any()


@each_t
def test_t_may_be_a_tensor(t: float) -> None:
    pair = example()
    tensor = torch.tensor(t, dtype=torch.float64)
    assert torch.equal(taid(**pair, t=tensor).loss, taid(**pair, t=t).loss)
