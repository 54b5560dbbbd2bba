"""Policy losses for old data against loops over tokens; which tokens REC keeps."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.policy import cispo, luffy, opmd, ppo, rec, sppo, topr
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Row, assert_equals_loop, by_row

Batch = dict[str, Tensor]
OLD = ("logprobs", "old_logprobs", "advantages", "mask")
ALONE = ("logprobs", "advantages", "mask")


def scored(row: Row, weights: list[float]) -> list[Piece]:
    """A weight times log pi."""
    return [Piece(-w * t.advantage * t.logprob, -w * t.advantage) for w, t in zip(weights, row, strict=True)]


def topr_row(row: Row, level: str) -> list[Piece]:
    product = math.exp(min(math.fsum(t.log_ratio for t in row), 0.0))
    tapers = [product if level == "sequence" else min(math.exp(t.log_ratio), 1.0) for t in row]
    return scored(row, [1.0 if t.advantage > 0 else w for w, t in zip(tapers, row, strict=True)])


def rec_row(row: Row, clip: str, weight: str, **bounds: float) -> list[Piece]:
    weights = []
    for t in row:
        r, good = math.exp(t.log_ratio), t.advantage >= 0
        low, high = 1 - bounds["clip_low"] <= r, r <= 1 + bounds["clip_high"]
        kept = {"none": True, "one-side": high if good else low, "two-side": low and high}
        ring = r <= 1 - bounds["outer_low"] if good else r >= 1 + bounds["outer_high"]
        kept["ring"] = kept["two-side"] or ring
        weights.append(kept[clip] * (r if weight == "ratio" else 1.0))
    return scored(row, weights)


def opmd_row(row: Row, tau: float) -> list[Piece]:
    return scored(row, [1 / (1 + tau)] * len(row))


def sppo_row(row: Row, epsilon: float) -> list[Piece]:
    limit, pieces = math.log(1 + epsilon), []
    for t in row:
        inside = -limit < t.log_ratio < limit
        pieces.append(Piece(-t.advantage * min(max(t.log_ratio, -limit), limit), -t.advantage * inside))
    return pieces


def luffy_row(row: Row, gamma: float) -> list[Piece]:
    ps = [math.exp(t.logprob) for t in row]
    slopes = [gamma * p / (p + gamma) ** 2 for p in ps]
    return [
        Piece(-t.advantage * p / (p + gamma), -t.advantage * slope)
        for t, p, slope in zip(row, ps, slopes, strict=True)
    ]


BOUNDS = {"clip_low": 0.1, "clip_high": 0.3, "outer_low": 0.4, "outer_high": 0.5}


@pytest.mark.parametrize(
    ("kernel", "row", "needs", "params"),
    [
        (topr, topr_row, OLD, {"level": "sequence"}),
        (topr, topr_row, OLD, {"level": "token"}),
        *(
            (rec, rec_row, OLD, {"clip": clip, "weight": weight, **BOUNDS})
            for clip in ("none", "one-side", "two-side", "ring")
            for weight in ("none", "ratio")
        ),
        (opmd, opmd_row, ALONE, {"tau": 0.5}),
        (sppo, sppo_row, OLD, {"epsilon": 0.3}),
        (luffy, luffy_row, ALONE, {"gamma": 0.1}),
        (luffy, luffy_row, ALONE, {"gamma": 0.5}),
    ],
)
@given(batch=token_batches())
def test_a_taper_is_what_a_loop_over_tokens_makes_of_it(
    kernel: Any, row: Any, needs: Any, params: dict[str, Any], batch: Batch
) -> None:
    assert_equals_loop(kernel, batch, by_row(partial(row, **params)), needs, **params)


@given(batch=token_batches())
def test_rec_with_the_ratio_as_weight_has_the_gradient_of_ppo(batch: Batch) -> None:
    logprobs, *rest = (batch[name] for name in OLD)
    logprobs.requires_grad_()
    ours, theirs = rec(logprobs, *rest, weight="ratio"), ppo(logprobs, *rest)
    gradients = [torch.autograd.grad(one.loss.sum(), logprobs)[0] for one in (ours, theirs)]
    assert_parity(*gradients, terms=2, what="gradient")


def test_topr_has_the_weight_of_truncated_importance_sampling_on_bad_responses_alone() -> None:
    """cispo with clip_low=1 and clip_high=0 truncates at 1 whatever the sign."""
    lp = torch.tensor([[-1.0, -2.0]] * 2, dtype=torch.float64)
    inputs = (
        lp,
        lp + torch.tensor([[0.5, -0.5]], dtype=torch.float64),
        torch.tensor([[1.0], [-1.0]]).double(),
        lp < 0,
    )
    ours, theirs = topr(*inputs, level="token").loss, cispo(*inputs, clip_low=1.0, clip_high=0.0).loss
    assert_parity(ours[1], theirs[1], terms=2)
    assert ours[0].tolist() == [1.0, 2.0] and theirs[0, 0] < 1
