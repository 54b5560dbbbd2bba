"""Gates on whole responses, against loops over tokens."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.policy import cppo, dppo_tv, flash_reinforce, tvpo
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Row, assert_equals_loop, by_row, clipped

Batch = dict[str, Tensor]
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages", "mask")
THREE = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")


def bernoulli_kl(q: float, p: float) -> float:
    """KL(Bernoulli(q) || Bernoulli(p)); 1e-8 keeps the logarithm finite at p = 1."""
    return q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))


def flash_row(row: Row, delta: float) -> list[Piece]:
    kls = [bernoulli_kl(math.exp(t.rollout), math.exp(t.logprob)) for t in row]
    kept = math.fsum(kls) / len(row) <= delta
    losses = [-kept * t.advantage * math.exp(t.logprob - t.rollout) for t in row]
    return [Piece(loss, loss) for loss in losses]


def tvpo_row(row: Row, threshold: float, weight_cap: float) -> list[Piece]:
    rhos = [math.exp(t.old - t.rollout) for t in row]
    far = math.fsum(abs(rho - 1) for rho in rhos) / len(row) > threshold
    pieces = []
    for t, rho in zip(row, rhos, strict=True):
        weight = min(rho, weight_cap)
        weight *= not (far and t.advantage * (t.old - t.rollout) > 0)
        piece = clipped(math.exp(t.log_ratio), t.advantage, 0.8, 1.2)
        pieces.append(Piece(weight * piece.value, weight * piece.slope))
    return pieces


def quantile(values: list[float], share: float) -> float:
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[math.ceil(place)] - ordered[low])


def cppo_row(row: Row, **o: Any) -> list[Piece]:
    """Algorithm 1 of the paper, token by token."""
    moves = [abs(math.exp(t.logprob) - math.exp(t.rollout)) for t in row]
    budget = min(max(quantile(moves, o["quantile"]), o["budget"]), o["budget_factor"] * o["budget"])
    spent, weights, pieces = 0.0, 0.0, []
    for i, (t, move) in enumerate(zip(row, moves, strict=True)):
        w = 1 - (1 - o["weight_min"]) * i / max(len(row) - 1, 1)
        room = min(o["tv_max"], o["tv_max"] + budget * weights - spent)
        r = math.exp(t.logprob - t.rollout)
        kept = t.advantage * (r - 1) <= 0 or w * move <= room
        weight = kept * min(r, o["ratio_cap"])
        pieces.append(Piece(-weight * t.advantage * t.logprob, -weight * t.advantage))
        spent, weights = spent + w * move, weights + w
    return pieces


CPPO = {"tv_max": 0.15, "weight_min": 0.8, "budget": 0.02, "budget_factor": 2.0, "quantile": 0.9}


@pytest.mark.parametrize(
    ("kernel", "row", "needs", "params"),
    [
        *((flash_reinforce, flash_row, ROLLOUT, {"delta": delta}) for delta in (1e-3, 0.03, 0.3)),
        (cppo, cppo_row, ROLLOUT, CPPO | {"ratio_cap": 20.0}),
        (cppo, cppo_row, ROLLOUT, CPPO | {"ratio_cap": 1.1, "quantile": 0.4, "budget_factor": 5.0}),
        (
            cppo,
            cppo_row,
            ROLLOUT,
            CPPO | {"ratio_cap": 9.0, "weight_min": 0.3, "tv_max": 0.05, "budget": 0.01},
        ),
        (tvpo, tvpo_row, THREE, {"threshold": 0.1, "weight_cap": 2.0}),
        (tvpo, tvpo_row, THREE, {"threshold": 0.2, "weight_cap": 1e9}),
        (tvpo, tvpo_row, THREE, {"threshold": 0.0, "weight_cap": 1.1}),
    ],
)
@given(batch=token_batches())
def test_a_gate_is_what_a_loop_over_tokens_makes_of_it(
    kernel: Any, row: Any, needs: Any, params: dict[str, Any], batch: Batch
) -> None:
    assert_equals_loop(kernel, batch, by_row(partial(row, **params)), needs, **params)


def test_a_kl_below_rounding_drops_no_response() -> None:
    """OpenRLHF/OpenRLHF#1354: the KL of two near probabilities is negative in float32."""
    lp = torch.full((1, 3), -1.0)
    near = torch.full((1, 3), -0.99999)
    loss = flash_reinforce(near, lp, torch.ones(1, 1), lp < 0, delta=0.0).loss
    assert loss.all()


def test_a_far_response_is_dropped_whole_by_one_loss_and_in_part_by_the_other() -> None:
    rollout = torch.full((1, 2), -2.0, dtype=torch.float64)
    old = rollout + torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    good, mask = torch.ones(1, 1, dtype=torch.float64), rollout < 0
    assert not flash_reinforce(old, rollout, good, mask, delta=0.01).loss.any()
    assert tvpo(old, old, rollout, good, mask, threshold=0.1).loss.bool().tolist() == [[False, True]]
    assert tvpo(old, old, rollout, -good, mask, threshold=0.1).loss.bool().tolist() == [[True, False]]


@given(batch=token_batches())
def test_cppo_without_weights_and_with_a_large_budget_is_dppo(batch: Batch) -> None:
    batch["rollout_logprobs"] = batch["old_logprobs"]
    inputs = [batch[name] for name in ROLLOUT]
    ours = cppo(*inputs, weight_min=1.0, budget=2.0).loss
    assert_parity(ours, dppo_tv(*inputs, tv_low=0.15, tv_high=0.15).loss, terms=1)
