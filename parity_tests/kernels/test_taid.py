"""TAID's loss at a fixed t, and its walk of t: against upstream's recordings and by their definition."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.taid import TaidState, start, step, taid
from composer_plugins.testing.assertions import assert_parity, largest_term
from composer_plugins.testing.strategies import logit_pairs
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim, is_nan, is_number
from parity_tests.rigs.logits import Pair, example, scale
from parity_tests.rigs.oracles import cross_entropy, kl, per_token

ts = st.sampled_from([0.0, 0.3, 0.75, 1.0])


def recorded(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Student's logits, our loss and its gradient for one case: upstream's token mean."""
    dtype = golden.dtype(case)
    student = golden.tensor(case["student_logits"], dtype).requires_grad_()
    teacher, mask = golden.tensor(case["teacher_logits"], dtype), torch.tensor(case["mask"]).bool()
    upstreams = reductions.kernel("divergence", "taid@taid")
    loss = aggregate(upstreams(student, teacher, mask, t=case["t"]).loss, mask, "token-mean")
    return student, loss, torch.autograd.grad(loss, student)[0]


@claim("taid_loss", where=is_number)
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


@claim("taid_loss", where=is_nan)
def test_empty_batch_is_zero_where_upstream_is_nan(case: Case) -> None:
    _, loss, gradient = recorded(case)
    assert not torch.tensor(case["mask"]).any()
    assert not loss and not gradient.any()


@given(logit_pairs(), ts)
def test_loss_and_its_kl_equal_plain_loops(pair: Pair, t: float) -> None:
    """Mixed in LOGIT space: mixing the probabilities gives other numbers."""
    student, teacher, mask = pair["student_logits"], pair["teacher_logits"], pair["mask"]
    # An entry that both forbid stays forbidden, but 0 * -inf is NaN.
    mixed = (1 - t) * student.clamp(min=-1e9) + t * teacher.clamp(min=-1e9)
    loss, metrics = taid(**pair, t=t)
    want = torch.where(mask, per_token(cross_entropy, mixed, student), 0.0)
    assert_parity(loss, want, **scale(pair))
    want = torch.where(mask, per_token(kl, mixed, student), 0.0)
    assert_parity(torch.where(mask, metrics["kl"].value, 0.0), want, **scale(pair), what="kl")
    assert torch.equal(metrics["kl"].where, mask)


each_t = pytest.mark.parametrize("t", [0.0, 0.3, 1.0])


@each_t
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["student_logits", "teacher_logits"])
def test_what_one_side_forbids_has_no_part_in_the_mixture(name: str, dtype: torch.dtype, t: float) -> None:
    """As -inf or as the smallest float: vocabularies are padded with either."""
    pair = example(2, 3, 5, dtype=dtype)
    (other,) = {"student_logits", "teacher_logits"} - {name}
    pair[name][..., 0] = -math.inf
    pair[other][..., 0] = torch.finfo(dtype).min
    student = pair["student_logits"].requires_grad_()
    loss = taid(**pair, t=t).loss
    without = {key: x[..., 1:] if "logits" in key else x for key, x in pair.items()}
    assert torch.allclose(loss, taid(**without, t=t).loss)
    (slope,) = torch.autograd.grad(loss.sum(), student)
    assert slope.isfinite().all() and not slope[..., 0].any()


@each_t
def test_t_may_be_a_tensor(t: float) -> None:
    pair = example(2, 3, 5)
    tensor = torch.tensor(t, dtype=torch.float64)
    assert torch.equal(taid(**pair, t=tensor).loss, taid(**pair, t=t).loss)


# The walk of t


@claim("taid_scheduler")
def test_walk_of_t_equals_upstream(case: Case) -> None:
    """`grad_accum` steps several times at one global step, `inf_first` begins with infinite losses."""
    dtype = golden.dtype(case)
    settings = {name: case[name] for name in ("t_start", "t_end", "alpha")}
    settings |= {"momentum": case["beta"], "adaptive": not case["disable_adaptive"]}
    state = start(t_start=case["t_start"], dtype=dtype)
    ours = []
    for record in case["steps"]:
        before, change = state, record["delta_t"]
        state = step(
            state,
            golden.tensor(record["loss"], dtype),
            progress=record["global_step"] / case["num_train_steps"],
            **settings,
        )
        ours.append([before.t, state.t, state.momentum, state.previous_loss])
        if change is not None:
            ahead = case["alpha"] * state.momentum.sigmoid() * (1 - before.t)
            recorded = golden.tensor(change)
            assert_parity(ahead, recorded, terms=len(case["steps"]), dtype=dtype, what="delta_t")
    names = ("t_used_for_loss", "t", "momentum", "prev_loss")
    for name, column in zip(names, zip(*ours, strict=True), strict=True):
        want = golden.tensor([record[name] for record in case["steps"]])
        # Each is a running sum: of increments of t, or of the decaying changes of the loss.
        assert_parity(torch.stack(column), want, terms=len(ours), dtype=dtype, what=name)


SETTINGS = {
    "t_start": st.sampled_from([0.0, 0.2, 0.4]),
    "t_end": st.sampled_from([0.5, 0.9, 1.0]),
    "alpha": st.sampled_from([5e-4, 0.5, 1.0]),
    "momentum": st.sampled_from([0.0, 0.5, 0.99]),
    "adaptive": st.booleans(),
}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.fixed_dictionaries(SETTINGS))
def test_t_never_falls_while_progress_grows_and_stays_within_its_ends(
    losses: list[float], settings: dict[str, Any]
) -> None:
    states = [start(t_start=settings["t_start"], dtype=torch.float64)]
    for i, loss in enumerate(losses):
        progress = i / max(len(losses) - 1, 1)
        states.append(step(states[-1], torch.tensor(loss).double(), progress=progress, **settings))
    path = [state.t.item() for state in states]
    assert path == sorted(path)
    assert path[0] == settings["t_start"] and path[-1] <= settings["t_end"]


def walk_at_rest(losses: list[float], **settings: float) -> TaidState:
    """The state after these losses without progress: all that moves t is the loss."""
    state = start(t_start=settings["t_start"])
    for loss in losses:
        state = step(state, torch.tensor(loss), progress=0.0, **settings)
    return state


def test_step_is_pure_and_cuts_the_graph() -> None:
    state = TaidState(*(torch.tensor(x) for x in (0.4, 0.1, 2.0)))
    copy = TaidState(*(x.clone() for x in state))
    loss = torch.tensor(1.5, requires_grad=True) * 1
    first, second = (step(state, loss, progress=0.1) for _ in range(2))
    assert state == copy and first == second and loss.item() == 1.5
    assert not any(x.requires_grad for x in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_progress_may_be_a_tensor_and_keeps_the_precision_of_the_state(dtype: torch.dtype) -> None:
    """A third is not a float32: through one, t would be wrong in the ninth digit of a float64."""
    state = TaidState(*(torch.tensor(x, dtype=dtype) for x in (0.2, 0.0, 2.0)))
    for progress in (1 / 3, torch.tensor(1 / 3, dtype=dtype)):
        after = step(state, torch.tensor(1.5), progress=progress, adaptive=False)
        assert after.t.dtype == dtype
        assert after.t.item() == pytest.approx(0.4 + 0.6 / 3, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_is_no_number_leaves_the_momentum_as_it_is(bad: float, dtype: torch.dtype) -> None:
    """Upstream's momentum would be NaN or infinite for good, and t with it."""
    before = TaidState(*(torch.tensor(x, dtype=dtype) for x in (0.4, 0.1, 1.0)))
    after = step(before, torch.tensor(bad), progress=0.9)
    assert (after.momentum, after.previous_loss) == (before.momentum, before.previous_loss)
    assert after.t.item() == pytest.approx(0.4 + 0.6 * 0.9)
    settings = {"t_start": 0.2, "t_end": 1.0, "alpha": 0.1, "momentum": 0.5}
    spoilt, sound = (walk_at_rest(losses, **settings) for losses in ([1.0, bad, 1.0, 0.9], [1.0, 1.0, 0.9]))
    assert spoilt.momentum == sound.momentum > 0 and spoilt.t > sound.t > 0.2
    late = walk_at_rest([bad, 1.0, 0.9], **settings)
    assert late == walk_at_rest([1.0, 0.9], **settings)  # nothing was seen before


def test_a_change_of_the_loss_beyond_the_largest_number_leaves_the_momentum_as_it_is() -> None:
    before = TaidState(*(torch.tensor(x) for x in (0.4, 0.1, 0.0)))
    after = step(before, torch.tensor(1e30), progress=0.0)
    assert after.momentum == before.momentum and after.previous_loss == 1e30


@pytest.mark.parametrize("adaptive", [True, False])
def test_progress_beyond_the_end_stays_at_the_end(adaptive: bool) -> None:
    state = TaidState(*(torch.tensor(x) for x in (0.4, 0.0, 2.0)))
    for progress in (2, torch.tensor(2.0)):
        ours = step(state, torch.tensor(1.5), progress=float(progress), t_end=0.75, adaptive=adaptive)
        assert ours.t == 0.75
