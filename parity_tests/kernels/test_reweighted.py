"""PPO's clip with another weight, against loops over tokens; what FIPO's weight looks at."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.policy import aspo, fipo, ppo, up_grpo
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Row, assert_equals_loop, by_row, clipped

Batch = dict[str, Tensor]


def fipo_row(row: Row, **o: Any) -> list[Piece]:
    cap, pieces = o.get("ratio_cap") or math.inf, []
    low, high = o.get("weight_low", 1.0), o.get("weight_high", 1.2)
    for t in row:
        r, a = math.exp(t.log_ratio), t.advantage
        future = math.fsum(
            2 ** (-(u.place - t.place) / o["half_life"]) * u.log_ratio
            for u in row
            if u.place >= t.place and math.exp(u.log_ratio) <= cap
        )
        f = min(max(math.exp(future), low), high)
        if a < 0 and r > o.get("safety", 4.0):
            f = min(max(f, 0.8), 1.0)
        bounded = -a * min(max(r, 1 - 0.2), 1 + 0.2)
        free, slope = (-a * r, -a * r) if r < cap else (-a * cap, 0.0)
        inside = 1 - 0.2 < r < 1 + 0.2
        value, slope = (free, slope) if free >= bounded else (bounded, -a * r if inside else 0.0)
        pieces.append(Piece(f * value, f * slope))
    return pieces


def aspo_row(row: Row, clip_low: float, clip_high: float, dual_clip: float) -> list[Piece]:
    pieces = []
    for t in row:
        r, a = math.exp(t.log_ratio), t.advantage
        if a > 0:
            bounded, inside = min(r, 1 + clip_high), r <= 1 + clip_high
            w = min(1 / bounded, dual_clip)
        else:
            bounded, inside = max(r, 1 - clip_low), r >= 1 - clip_low
            w = min(bounded, dual_clip)
        pieces.append(Piece(-a * w, -a * w * inside))
    return pieces


def up_grpo_row(row: Row, dual_clip: float) -> list[Piece]:
    return [
        Piece(-t.advantage, -t.advantage)
        if t.advantage > 0
        else clipped(math.exp(t.log_ratio), t.advantage, 0.8, math.inf, dual_clip)
        for t in row
    ]


@pytest.mark.parametrize(
    ("kernel", "row", "params"),
    [
        (fipo, fipo_row, {"half_life": 32.0}),
        (fipo, fipo_row, {"half_life": 2.0, "weight_low": 0.8, "weight_high": 1.5, "ratio_cap": 2.0}),
        (fipo, fipo_row, {"half_life": 0.5, "weight_low": 0.0, "weight_high": 1e9, "safety": 1e9}),
        (fipo, fipo_row, {"half_life": 4.0, "safety": 1.5}),
        (aspo, aspo_row, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        (aspo, aspo_row, {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.2}),
        (up_grpo, up_grpo_row, {"dual_clip": 3.0}),
        (up_grpo, up_grpo_row, {"dual_clip": 1e9}),
    ],
)
@given(batch=token_batches())
def test_a_weight_is_what_a_loop_over_tokens_makes_of_it(
    kernel: Any, row: Any, params: dict[str, Any], batch: Batch
) -> None:
    assert_equals_loop(kernel, batch, by_row(partial(row, **params)), **params)


def test_fipo_without_a_shift_after_a_token_is_ppo() -> None:
    """The weight looks ahead only: at the last token that has moved, and at what follows it."""
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    lp = old + torch.tensor([[0.0, 0.1, 0.0, 0.0]], dtype=torch.float64)
    inputs = lp, old, torch.ones(1, 1, dtype=torch.float64), old < 0
    weight = fipo(*inputs, half_life=1.0).metrics["weight"].value[0]
    assert_parity(weight, torch.tensor([0.05, 0.1, 0.0, 0.0], dtype=torch.float64).exp(), terms=2)
    assert_parity(fipo(*inputs, half_life=1.0).loss[0, 2:], ppo(*inputs).loss[0, 2:], terms=1)


def test_a_token_that_lags_behind_weighs_more_in_aspo_and_less_in_ppo() -> None:
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    lp = (old + torch.tensor([[-0.5, 0.1]], dtype=torch.float64)).requires_grad_()
    inputs = lp, old, torch.ones(1, 1, dtype=torch.float64), old < 0
    ours, theirs = (-torch.autograd.grad(one(*inputs).loss.sum(), lp)[0] for one in (aspo, ppo))
    assert_parity(ours * theirs, torch.ones_like(ours), terms=2)
    assert ours[0, 0] > 1 > theirs[0, 0]
