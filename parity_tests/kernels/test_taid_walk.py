"""TAID's walk of t, against upstream's recording and by its definition."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from composer_plugins.kernels.taid import TaidState, start, step
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim


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


losses = st.lists(st.floats(0, 1e6), min_size=1, max_size=12)
settings = st.fixed_dictionaries(
    {
        "t_start": st.sampled_from([0.0, 0.2, 0.4]),
        "t_end": st.sampled_from([0.5, 0.9, 1.0]),
        "alpha": st.sampled_from([5e-4, 0.5, 1.0]),
        "momentum": st.sampled_from([0.0, 0.5, 0.99]),
    }
)


def walk(losses: list[float], **settings: float) -> list[TaidState]:
    """One step per loss, progress growing evenly from 0 to 1; the first state is the start."""
    states = [start(t_start=settings["t_start"], dtype=torch.float64)]
    for i, loss in enumerate(losses):
        progress = i / max(len(losses) - 1, 1)
        loss = torch.tensor(loss, dtype=torch.float64)
        states.append(step(states[-1], loss, progress=progress, **settings))
    return states


@given(losses, settings, st.booleans())
def test_t_never_falls_while_progress_grows_and_stays_within_its_ends(
    losses: list[float], settings: dict[str, float], adaptive: bool
) -> None:
    path = [state.t.item() for state in walk(losses, **settings, adaptive=adaptive)]
    assert path == sorted(path)
    assert path[0] == settings["t_start"] and path[-1] <= settings["t_end"]


@given(losses, settings)
def test_t_is_at_least_linear_and_ahead_of_it_only_by_alpha(
    losses: list[float], settings: dict[str, float]
) -> None:
    ahead, linear = walk(losses, **settings), walk(losses, **settings, adaptive=False)
    for before, after, line in zip(ahead, ahead[1:], linear[1:], strict=False):
        assert after.t >= line.t
        assert after.t <= max(line.t, before.t + settings["alpha"] * (1 - before.t)) + 1e-15
    start, end, n = settings["t_start"], settings["t_end"], len(losses)
    line = [start + (end - start) * i / (n - 1) for i in range(1, n)]
    assert [state.t.item() for state in linear[2:]] == pytest.approx(line)


def test_t_walks_faster_while_the_loss_falls() -> None:
    still = {"t_start": 0.2, "t_end": 1.0, "alpha": 0.1, "momentum": 0.5}
    states = {name: walk_at_rest([2.0, loss], **still) for name, loss in (("falls", 1.0), ("grows", 3.0))}
    assert states["falls"].t > states["grows"].t > 0.2
    assert states["falls"].momentum > 0 > states["grows"].momentum


def walk_at_rest(losses: list[float], **settings: float) -> TaidState:
    """As `walk` but without progress: all that moves t is the loss. The last state."""
    state = start(t_start=settings["t_start"])
    for loss in losses:
        state = step(state, torch.tensor(loss), progress=0.0, **settings)
    return state


def test_first_finite_loss_is_only_recorded() -> None:
    """Without a loss before it there is no change of the loss; t waits, whatever the progress."""
    before = start(t_start=0.3)
    assert before.previous_loss.isinf() and not before.momentum
    after = step(before, torch.tensor(1.7), progress=0.5)
    assert after == (before.t, before.momentum, torch.tensor(1.7))


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
    upstream = 0.5 * 0.0 + 0.5 * (1.0 - bad) / 1.0
    assert not math.isfinite(0.5 * upstream)


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
