"""Group-relative advantages: loops, and what they promise of equal rewards, offsets and masks."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.advantages import (
    dr_grpo,
    gpg,
    grpo,
    grpo_leave_one_out,
    maxrl,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import NUM_GROUPS, float_tensors
from composer_plugins.testing.settings import settings as settings_of
from composer_plugins.testing.strategies import grouped_rewards
from parity_tests.rigs.every import each, row_id, rows

Estimator = Callable[..., Tensor]


def whitened(rewards: Tensor, ids: Tensor, mask: Tensor | None = None, **options: float) -> Tensor:
    return reinforce_pp_baseline(rewards, ids, None, mask, **options)


def std(xs: list[float], ddof: int) -> float:
    squares = math.fsum((x - fmean(xs)) ** 2 for x in xs)
    return math.sqrt(squares / (len(xs) - ddof)) if len(xs) > ddof else 0.0


def loop(rewards: Tensor, ids: Tensor, unmasked: Tensor, one: Callable[..., float]) -> Tensor:
    """`one(reward, rewards of its group, rewards of the batch)` of every unmasked row, 0 elsewhere."""
    rows = list(zip(rewards.tolist(), ids.tolist(), unmasked.tolist(), strict=True))
    batch = [r for r, _, is_unmasked in rows if is_unmasked]
    return rewards.new_tensor(
        [
            one(r, [s for s, j, is_unmasked in rows if is_unmasked and j == i], batch) if mine else 0.0
            for r, i, mine in rows
        ]
    )


def scaled(xs: list[float], r: float, deviation: float, eps: float) -> float:
    return (r - fmean(xs)) / (deviation + eps) if max(xs) > min(xs) else 0.0


def lengths(rewards: Tensor) -> Tensor:
    """A length that depends on the reward, so that a loop over rewards alone can find it; up to 5."""
    return 1 + (10 * rewards.nan_to_num()).round().long() % 5


def weighted_mean(xs: list[float]) -> float:
    weights = [1 + round(10 * x) % 5 for x in xs]
    return math.fsum(w * x for w, x in zip(weights, xs, strict=True)) / sum(weights)


def lead(r: float, xs: list[float]) -> float:
    if len(xs) == 1 or r < max(xs):
        return 0.0
    return r - sorted(xs)[-2]


def whitened_loop(centred: Tensor, unmasked: Tensor) -> Tensor:
    xs = centred[unmasked].tolist()
    deviation = std(xs, 1) if len(xs) > 1 else 0.0
    scale = 0.0 if deviation < 1e-12 else 1 / math.sqrt(deviation**2 + 0.01)
    return torch.where(unmasked, (centred - (fmean(xs) if xs else 0.0)) * scale, 0.0)


def against_the_others(r: float, xs: list[float]) -> float:
    return r - (math.fsum(xs) - r) / (len(xs) - 1)


def left_out(r: float, xs: list[float]) -> float:
    others = sorted(xs)
    others.remove(r)
    if not others:
        return 0.0
    deviation = std(others, 1) if len(others) > 1 else 0.0
    return (r - fmean(others)) / (deviation + 1e-6 if deviation > 1e-9 else 1.0)


ORACLES: dict[str, tuple[Estimator, Callable[..., float] | None]] = {
    "grpo": (grpo, lambda r, xs, _: scaled(xs, r, std(xs, 1), 1e-6)),
    "grpo-ddof0": (partial(grpo, ddof=0, eps=1e-4), lambda r, xs, _: scaled(xs, r, std(xs, 0), 1e-4)),
    "grpo-batch": (partial(grpo, scale="batch"), lambda r, xs, batch: scaled(xs, r, std(batch, 1), 1e-6)),
    "grpo-raw": (
        partial(grpo, singleton="raw"),
        lambda r, xs, _: scaled(xs, r, std(xs, 1), 1e-6) if len(xs) > 1 else r / (1 + 1e-6),
    ),
    "dr_grpo": (dr_grpo, lambda r, xs, _: r - fmean(xs)),
    "grpo_leave_one_out": (grpo_leave_one_out, lambda r, xs, _: left_out(r, xs)),
    "rloo": (rloo, lambda r, xs, _: against_the_others(r, xs) if len(xs) > 1 else 0.0),
    "rloo-raw": (
        partial(rloo, singleton="raw"),
        lambda r, xs, _: against_the_others(r, xs) if len(xs) > 1 else r,
    ),
    "maxrl": (maxrl, lambda r, xs, _: (r - fmean(xs)) / fmean(xs) if fmean(xs) > 1e-12 else 0.0),
    "opo": (
        lambda rewards, ids, mask: opo(rewards, ids, lengths(rewards), mask),
        lambda r, xs, _: r - weighted_mean(xs),
    ),
    "gpg": (
        partial(gpg, f_norm=2.0),
        lambda r, xs, batch: (r - fmean(xs)) * len(batch) / max(1, sum(x != 0 for x in batch)) / 2,
    ),
    "pass_at_k": (pass_at_k, lambda r, xs, _: lead(r, xs)),
    "pass_at_k-group": (
        partial(pass_at_k, scale="group"),
        lambda r, xs, _: lead(r, xs) / (std(xs, 1) + 1e-6) if lead(r, xs) else 0.0,
    ),
    "reinforce_pp_baseline": (partial(whitened, variance_eps=0.01), None),  # of the whole batch: below
}


@pytest.mark.parametrize("kernel, oracle", ORACLES.values(), ids=ORACLES)
@given(grouped=grouped_rewards(), seed=st.integers(0, 99), masked=st.sampled_from([0.0, 0.3, 1.0]))
def test_advantages_equal_loops(
    kernel: Estimator,
    oracle: Callable[..., float] | None,
    grouped: tuple[Tensor, Tensor],
    seed: int,
    masked: float,
) -> None:
    rewards, ids = grouped
    unmasked = torch.rand(len(ids), generator=torch.Generator().manual_seed(seed)) >= masked
    # Rewards are tenths: deviations of at least 0.02 divide the rounding of the largest reward.
    largest = 50 * max(1.0, float(rewards.abs().max()))
    unscorable = torch.where(unmasked, rewards, torch.nan)
    if oracle is None:
        expected = whitened_loop(loop(rewards, ids, unmasked, lambda r, xs, _: r - fmean(xs)), unmasked)
    else:
        expected = loop(rewards, ids, unmasked, oracle)
    assert_parity(kernel(unscorable, ids, unmasked), expected, terms=len(ids), magnitude=largest)


def test_reinforce_pp_baseline_counts_a_row_once_for_each_of_its_tokens() -> None:
    rewards, tokens = torch.tensor([0.0, 1.0, 0.25, 0.5]).double(), torch.tensor([1, 3, 2, 5])
    found = reinforce_pp_baseline(rewards, torch.tensor([0, 0, 1, 1]), tokens, variance_eps=0.0)
    found = found.repeat_interleave(tokens)
    assert (float(found.mean()), float(found.var())) == pytest.approx((0.0, 1.0), abs=1e-12)


def test_equal_rewards_do_not_get_zero_by_upstream_arithmetic() -> None:
    rewards = torch.full((8,), 0.1)
    upstream = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # verl, slime, miles
    assert upstream.abs().max() > 1e-3, "torch's mean has become exact"


def test_rewards_equal_up_to_rounding_get_zero() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    ids = torch.zeros(3, dtype=torch.long)
    assert rewards.unique().numel() == 2
    assert not any(estimator(rewards, ids).any() for estimator in (grpo, dr_grpo, rloo))


def test_close_but_different_rewards_keep_their_advantages() -> None:
    # verl's vectorised estimator lost these to a floor under its variance (its pull request 6348).
    rewards = torch.tensor([1.00000, 1.00001, 2.00000, 2.00001])
    ours = grpo(rewards, torch.tensor([0, 0, 1, 1]))
    exact = [-0.6196, 0.6196, -0.6196, 0.6196]
    assert ours.tolist() == pytest.approx(exact, rel=0.02)  # a reward is known to 1e-7 of 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_large_offset_does_not_swallow_advantages(dtype: torch.dtype, offset: float) -> None:
    base = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0], dtype=dtype)
    ids = torch.tensor([5, 5, 5, 2, 2])
    for estimator in (grpo, dr_grpo, rloo):
        ours = estimator(base + offset, ids)
        assert_parity(ours, estimator(base, ids), terms=5, dtype=dtype, magnitude=2.0)


@each("advantage")
def test_no_rows_give_no_advantages(row: Loss) -> None:
    for setting in settings_of(row):
        assert len(setting.result(setting.draw(size=0))) == 0


def test_opo_of_a_group_without_an_unmasked_token_takes_the_plain_mean() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    ours = opo(rewards, torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    assert ours.tolist() == [-2.0, -1.0, 3.0]


NUMBERED = [row for row in rows("advantage") if NUM_GROUPS in row.optional]


@pytest.mark.thorough
@pytest.mark.parametrize("row", NUMBERED, ids=row_id)
def test_ids_that_are_numbered_already_give_the_same_without_a_sort(row: Loss) -> None:
    *_, setting = settings_of(row, thorough=False)
    for seed, unused in product(range(25), range(4)):
        batch = setting.draw(seed, size=12)
        count = batch.pop(NUM_GROUPS) + unused
        sorted_ids = setting.result(batch)
        assert_parity(setting.result(batch | {NUM_GROUPS: count}), sorted_ids, terms=12, magnitude=10.0)


@pytest.mark.parametrize("unit", [1e-15, 1e-8, 1.0, 1e8, 1e15])
def test_rewards_of_these_magnitudes_keep_their_advantages_in_float32(unit: float) -> None:
    """Beyond, the square of a difference overflows or underflows: that is the limit the README names."""
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 2.0])
    wanted = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    for scale in ("group", "batch", "none"):
        ours = grpo(rewards * unit, ids, eps=0.0, scale=scale)
        divisor = {"group": 1.0, "batch": float(rewards.std()), "none": 1 / unit}[scale]
        assert_parity(ours, wanted / divisor, terms=6, dtype=torch.float32, magnitude=1 / divisor)
    beyond = [unit for unit in (1e-25, 1e20) if grpo(rewards * unit, ids, eps=0.0).any()]
    assert not beyond, "the README may promise more"


OF_ROWS = [row for row in rows("advantage") if {"rewards", "reward_components"} & {*row.needs}]


@pytest.mark.thorough
@pytest.mark.parametrize("row", OF_ROWS, ids=row_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.0, -1 / 3, 1e-30, 1e6 + 0.1, 1e30])
def test_equal_rewards_have_no_advantage_at_all(row: Loss, dtype: torch.dtype, reward: float) -> None:
    for setting in settings_of(row):
        if setting.params.get("singleton") == "raw":
            continue  # a group of one gets its reward
        for size in (1, 3, 8, 30):
            batch = setting.draw(size=size, unmasked=0.7 if size > 3 else 1.0, dtype=dtype)
            rewards = {
                n: torch.full_like(x, reward) for n, x in float_tensors(batch).items() if "reward" in n
            }
            ours = setting.result(batch | rewards)
            assert not ours.any(), f"{setting.label}, {size} rows: {ours.tolist()}"
