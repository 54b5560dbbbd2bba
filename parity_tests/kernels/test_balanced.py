"""Clip ranges that are found for each batch, against a search in plain Python."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.policy import bapo, m2po, ppo
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Rows, assert_equals_loop, clipped

Batch = dict[str, Tensor]


def mixed(batch: Batch) -> Batch:
    """The batch with advantages of both signs in each row."""
    return batch | {"advantages": batch["advantages"] + (7 * batch["logprobs"]).sin()}


def bounded(rows: Rows, low: float, high: float, dual: float | None = None) -> list[list[Piece]]:
    return [[clipped(math.exp(t.log_ratio), t.advantage, low, high, dual) for t in row] for row in rows]


def bapo_range(
    rows: Rows, first: str, share: float, low: list[float], high: list[float]
) -> tuple[float, float]:
    """Walk through the ranges; `low` and `high` are start, end, step."""
    tokens = [(math.exp(t.log_ratio), t.advantage) for t in chain.from_iterable(rows)]
    c_low, c_high = low[0], high[0]
    while True:
        good = math.fsum(a * min(r, c_high) for r, a in tokens if a > 0)
        bad = math.fsum(-a * max(r, c_low) for r, a in tokens if a < 0)
        if good >= share * (good + bad):
            return c_low, c_high
        can = {"low": c_low < low[1], "high": c_high < high[1]}
        second = "low" if first == "high" else "high"
        moved = first if can[first] else second
        if not can[moved]:
            return c_low, c_high
        if moved == "low":
            c_low = min(c_low + low[2], low[1])
        else:
            c_high = min(c_high + high[2], high[1])


@pytest.mark.parametrize("first", ["high", "low"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
@given(batch=token_batches())
def test_bapo_is_what_its_search_finds(first: str, share: float, batch: Batch) -> None:
    params: dict[str, Any] = {"ratio_low_max": 0.9, "ratio_high_max": 3.0, "step_low": 0.07, "step_high": 0.1}
    params |= {"dual_clip": 3.0}

    def wanted(rows: Rows) -> list[list[Piece]]:
        low, high = bapo_range(rows, first, share, [0.6, 0.9, 0.07], [1.2, 3.0, 0.1])
        return bounded(rows, low, high, 3.0)

    assert_equals_loop(bapo, mixed(batch), wanted, share=share, first=first, **params)


def m2po_range(rows: Rows, budget: float) -> tuple[float, float]:
    """The largest cap among the log ratios that keeps the mean of the capped squares below the budget."""
    moved = [t.log_ratio for t in chain.from_iterable(rows) if t.log_ratio * t.advantage > 0]
    if not moved or math.fsum(d * d for d in moved) / len(moved) <= budget:
        return 0.0, math.inf
    caps = [0.0] + [
        abs(cap) for cap in moved if math.fsum(min(d * d, cap * cap) for d in moved) / len(moved) < budget
    ]
    return math.exp(-max(caps)), math.exp(max(caps))


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("budget", [0.04, 1e-3, 0.5])
@given(batch=token_batches())
def test_m2po_is_what_its_search_finds(budget: float, least: float, batch: Batch) -> None:
    def wanted(rows: Rows) -> list[list[Piece]]:
        low, high = m2po_range(rows, budget)
        return bounded(rows, min(low, 1 - least), max(high, 1 + least))

    assert_equals_loop(m2po, mixed(batch), wanted, budget=budget, least_low=least, least_high=least)


def test_a_batch_within_the_budget_or_in_balance_is_not_widened() -> None:
    lp = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], dtype=torch.float64)
    inputs = lp, lp - 0.1, torch.tensor([[2.0], [-1.0]], dtype=torch.float64), lp < 0
    assert_parity(m2po(*inputs).loss, ppo(*inputs, clip_low=1.0, clip_high=1e9).loss, terms=1)
    assert_parity(bapo(*inputs).loss, ppo(*inputs, clip_low=0.4, clip_high=0.2).loss, terms=1)
    assert float(bapo(*inputs).metrics["clip_high"].value[0, 0]) == 1.2
    worse = (*inputs[:2], -inputs[2], inputs[3])
    assert float(bapo(*worse).metrics["clip_low"].value[0, 0]) == 0.9
