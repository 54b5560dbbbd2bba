"""Quadratic penalties in place of a clip, against loops over tokens; where they are least."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.policy import dro, drpo, kimi_k15, spo
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Row, Token, assert_equals_loop, by_row, by_token

Batch = dict[str, Tensor]
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages", "mask")


def spo_piece(one: Token, epsilon: float) -> Piece:
    r, a = math.exp(one.log_ratio), one.advantage
    value = -a * r + abs(a) * (r - 1) ** 2 / (2 * epsilon)
    return Piece(value, (-a + abs(a) * (r - 1) / epsilon) * r)


def drpo_piece(one: Token, delta: float, log_ratio_clamp: float | None = None) -> Piece:
    """The slope is -A r (1 - sign(A) (p - q) / delta), table 1 of the paper."""
    d, q, a = one.logprob - one.rollout, math.exp(one.rollout), one.advantage
    free = log_ratio_clamp is None or abs(d) < log_ratio_clamp
    r = math.exp(d if log_ratio_clamp is None else min(max(d, -log_ratio_clamp), log_ratio_clamp))
    value = -a * r + abs(a) * q * (r - 1) ** 2 / (2 * delta)
    return Piece(value, free * -a * r * (1 - math.copysign(1, a) * (r * q - q) / delta))


def kimi_pieces(row: Row, tau: float) -> list[Piece]:
    total = math.fsum(one.log_ratio for one in row)
    return [
        Piece(-one.advantage * one.logprob + tau / 2 * one.log_ratio * total, -one.advantage + tau * total)
        for one in row
    ]


@pytest.mark.parametrize(
    ("kernel", "piece", "needs", "params"),
    [
        (spo, spo_piece, None, {"epsilon": 0.2}),
        (spo, spo_piece, None, {"epsilon": 3.0}),
        (drpo, drpo_piece, ROLLOUT, {"delta": 12.5}),
        (drpo, drpo_piece, ROLLOUT, {"delta": 0.1}),
        (drpo, drpo_piece, ROLLOUT, {"delta": 0.1, "log_ratio_clamp": 0.2}),
    ],
)
@given(batch=token_batches())
def test_a_penalty_is_what_a_loop_over_tokens_makes_of_it(
    kernel: Any, piece: Any, needs: Any, params: dict[str, float], batch: Batch
) -> None:
    loop = by_token(partial(piece, **params))
    extra = {} if needs is None else {"needs": needs}
    assert_equals_loop(kernel, batch, loop, **extra, **params)


@given(batch=token_batches())
def test_kimi_k15_is_the_regression_of_its_paper(batch: Batch) -> None:
    """Its gradient is that of tau / 2 (A / tau - log ratio of the response)^2, which OpenKimi minimises."""
    token = assert_equals_loop(
        kimi_k15, batch, by_row(partial(kimi_pieces, tau=0.3)), tau=0.3, magnitude=40.0
    )
    assert token.metrics["sequence_log_ratio"].value.shape == batch["mask"].shape
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss = kimi_k15(logprobs, batch["old_logprobs"], batch["advantages"], batch["mask"], tau=0.3).loss
    total = torch.where(batch["mask"], logprobs - batch["old_logprobs"], 0.0).sum(-1)
    residual = batch["advantages"][:, 0] / 0.3 - total
    wanted = torch.autograd.grad((0.15 * residual.square() * batch["mask"].any(-1)).sum(), logprobs)[0]
    assert_parity(torch.autograd.grad(loss.sum(), logprobs)[0], wanted, terms=9, magnitude=40.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_gradient_ends_where_the_ratio_or_the_probability_has_moved_far_enough(sign: float) -> None:
    old = torch.full((1, 1), math.log(0.5), dtype=torch.float64)
    a, mask = torch.full((1, 1), 2 * sign, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    for kernel, shift, params in ((spo, 0.5 * 0.2, {"epsilon": 0.2}), (drpo, 0.2, {"delta": 0.2})):
        for factor, wanted in ((0.9, -sign), (1.0, 0.0), (1.1, sign)):
            x = torch.log(old.exp() + sign * factor * shift).requires_grad_()
            (g,) = torch.autograd.grad(kernel(x, old, a, mask, **params).loss.sum(), x)
            slope = float(g) if abs(float(g)) > 1e-12 else 0.0
            assert math.copysign(bool(slope), slope) == wanted, (kernel.__name__, factor)


def test_the_square_of_one_token_is_that_of_dro() -> None:
    lp = torch.tensor([[-1.0], [-2.5]], dtype=torch.float64)
    inputs = lp, lp - 0.4, torch.tensor([[0.5], [-1.0]], dtype=torch.float64), lp < 0
    ours, theirs = kimi_k15(*inputs, tau=0.2).loss, dro(*inputs, beta=0.2).loss
    assert_parity(ours, theirs, terms=2)
    assert float(aggregate(ours, inputs[3], "seq-mean-token-sum")) != 0
