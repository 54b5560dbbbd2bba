"""PPO with other bounds, against loops over tokens; what DCPO's bounds mean."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.policy import ce_gppo, cpgd, dcpo, ppo
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.loops import Piece, Token, assert_equals_loop, by_token, clipped

Batch = dict[str, Tensor]
OLD = ("logprobs", "old_logprobs", "advantages", "mask")


def ce_gppo_piece(one: Token, beta_low: float, beta_high: float, dual_clip: float | None) -> Piece:
    r, a, w = math.exp(one.log_ratio), one.advantage, math.exp(one.log_ratio)
    if a < 0 and r < 0.8:
        w = beta_low * 0.8
    if a > 0 and r > 1.2:
        w = beta_high * 1.2
    if dual_clip is not None and a < 0 and -a * dual_clip < -a * w:
        return Piece(-a * dual_clip, 0.0)
    return Piece(-a * w, -a * w)


def dcpo_piece(
    one: Token, epsilon_low: float, epsilon_high: float, ratio_max: float, dual_clip: float
) -> Piece:
    q = math.exp(one.old)
    low = (1 + math.sqrt(max(1 - 4 * epsilon_low / q, 0))) / 2
    high = min((1 + math.sqrt(1 + 4 * epsilon_high / q)) / 2, ratio_max)
    return clipped(math.exp(one.log_ratio), one.advantage, low, high, dual_clip)


def cpgd_piece(one: Token, clip_low: float, clip_high: float) -> Piece:
    a, lp = one.advantage, one.logprob
    bound = one.old + (math.log(1 + clip_high) if a > 0 else math.log(1 - clip_low))
    inside = lp < bound if a > 0 else lp > bound
    return Piece(-a * (lp if inside else bound), -a * inside)


@pytest.mark.parametrize(
    ("kernel", "piece", "params"),
    [
        (ce_gppo, ce_gppo_piece, {"beta_low": 0.75, "beta_high": 1.0, "dual_clip": None}),
        (ce_gppo, ce_gppo_piece, {"beta_low": 0.25, "beta_high": 0.5, "dual_clip": 1.5}),
        (dcpo, dcpo_piece, {"epsilon_low": 0.16, "epsilon_high": 0.2, "ratio_max": 10.0, "dual_clip": 10.0}),
        (dcpo, dcpo_piece, {"epsilon_low": 0.02, "epsilon_high": 0.01, "ratio_max": 1.1, "dual_clip": 1.2}),
        (cpgd, cpgd_piece, {"clip_low": 0.2, "clip_high": 0.2}),
        (cpgd, cpgd_piece, {"clip_low": 0.5, "clip_high": 0.05}),
    ],
)
@given(batch=token_batches())
def test_a_bound_is_what_a_loop_over_tokens_makes_of_it(
    kernel: Any, piece: Any, params: dict[str, Any], batch: Batch
) -> None:
    assert_equals_loop(kernel, batch, by_token(partial(piece, **params)), magnitude=1.0, **params)


@given(batch=token_batches())
def test_ce_gppo_with_betas_of_0_has_the_gradient_of_ppo(batch: Batch) -> None:
    logprobs, *rest = (batch[name] for name in OLD)
    logprobs.requires_grad_()
    ours, theirs = ce_gppo(logprobs, *rest, beta_low=0.0, beta_high=0.0), ppo(logprobs, *rest)
    gradients = [torch.autograd.grad(one.loss.sum(), logprobs)[0] for one in (ours, theirs)]
    assert_parity(*gradients, terms=2, what="gradient")


def test_the_bounds_of_dcpo_are_those_of_the_shift_times_the_probability() -> None:
    """|r - 1| p is epsilon at both, where the ratio's cap and the root allow it."""
    old = torch.tensor([[0.9, 0.7, 0.1]], dtype=torch.float64).log()
    metrics = dcpo(old, old, torch.ones(1, 1, dtype=torch.float64), old < 0).metrics
    q, high, low = old.exp(), metrics["clip_high"].value, metrics["clip_low"].value
    assert_parity((high - 1) * high * q, torch.full_like(q, 0.2), terms=4)
    assert_parity(((1 - low) * low * q)[:, :2], torch.full_like(q, 0.16)[:, :2], terms=4)
    assert float(low[0, 2]) == 0.5  # no ratio below 1 moves so unlikely a token too far
