"""Rollout corrections: plain loops, and what the weights promise."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.corrections import corrected, icepop, mis, seq_mask_tis, tis
from composer_plugins.kernels.policy import grpo, gspo
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import float_tensors, one_of_each_row, poisoned_at, with_junk
from composer_plugins.testing.settings import settings
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.every import each

LEVELS = ("token", "sequence", "geometric")
Batch = dict[str, Tensor]


def inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Old and rollout log-probabilities, with junk where the mask is False."""
    mask = batch["mask"]
    return with_junk(batch["logprobs"], mask), with_junk(batch["old_logprobs"], mask), mask


def loop(batch: Batch, level: str, clamp: float, weight: Callable[[float], float]) -> Tensor:
    """The weight of each unmasked token, from a log ratio within `clamp`."""
    drift, wanted = batch["logprobs"] - batch["old_logprobs"], torch.zeros_like(batch["logprobs"])
    for i, row in enumerate(batch["mask"]):
        each = drift[i, row].tolist()
        if level != "token":
            each = [math.fsum(each) / (max(len(each), 1) if level == "geometric" else 1)] * len(each)
        weights = [weight(math.exp(min(max(v, -clamp), clamp))) for v in each]
        wanted[i, row] = wanted.new_tensor(weights)
    return wanted


@pytest.mark.parametrize("level", LEVELS)
@given(
    batch=token_batches(),
    low=st.sampled_from([None, 0.5, 0.9]),
    high=st.sampled_from([1.1, 2.0, 5.0]),
    clamp=st.sampled_from([None, 0.3]),
)
def test_weights_equal_loops(
    level: str, batch: Batch, low: float | None, high: float, clamp: float | None
) -> None:
    floor = 0.0 if low is None else low
    banded = loop(batch, level, clamp or math.inf, lambda w: w if floor <= w <= high else 0.0)
    capped = loop(batch, level, clamp or math.inf, lambda w: min(max(w, floor), high))
    batch["logprobs"].requires_grad_()
    scale = {"terms": batch["mask"].shape[-1], "magnitude": high * 40}  # exp of a sum of log-ratios
    masked = mis(*inputs(batch), high=high, low=low, level=level, log_ratio_clamp=clamp)
    truncated = tis(*inputs(batch), cap=high, floor=low, level=level, log_ratio_clamp=clamp)
    assert_parity(masked, banded, **scale)
    assert_parity(truncated, capped, **scale)
    assert not masked.requires_grad and not truncated.requires_grad
    kept = loop(batch, "geometric", clamp or math.inf, lambda w: float(floor <= w <= high))
    by_token = loop(batch, "token", clamp or math.inf, lambda w: w)
    both = seq_mask_tis(*inputs(batch), low=floor, high=high, log_ratio_clamp=clamp)
    assert_parity(both, kept * by_token, terms=batch["mask"].shape[-1], magnitude=40.0)
    if level == "token" and low is not None and clamp is None:
        assert torch.equal(icepop(*inputs(batch), low=low, high=high), masked)


@pytest.mark.parametrize("level", LEVELS)
def test_an_unknown_rollout_probability_is_nan_here_and_a_weight_of_one_in_trl(level: str) -> None:
    old, mask = torch.full((2, 2), -1.0), torch.tensor([[True, True], [True, False]])
    rollout = torch.tensor([[torch.nan, -1.0], [-1.0, torch.nan]])
    for weights in (tis(old, rollout, mask, level=level), mis(old, rollout, mask, high=3.0, level=level)):
        wanted = [[True, level != "token"], [False, False]]
        assert weights.isnan().tolist() == wanted
        assert weights[1].tolist() == [1.0, 0.0]
    assert torch.nan_to_num(old - rollout, nan=0.0).exp()[0, 0] == 1  # TRL: as if on-policy


@given(batch=token_batches(), level=st.sampled_from(LEVELS))
def test_normalised_weights_have_a_mean_of_one(batch: Batch, level: str) -> None:
    w = tis(*inputs(batch), level=level, normalise=True)
    mask = batch["mask"]
    if not mask.any():
        assert not w.any()
        return
    assert not mis(*inputs(batch), high=0.0, level=level, normalise=True).any()  # no weight is left
    each = w[mask] if level == "token" else w.sum(-1)[mask.any(-1)] / mask.sum(-1)[mask.any(-1)]
    assert float(each.mean()) == pytest.approx(1.0, rel=1e-12)


def test_a_corrected_loss_is_the_loss_times_its_weight_where_there_is_a_mask() -> None:
    mask = torch.tensor([[True, True, False]])
    x = torch.tensor([[1.0, -2.0, 3.0]], requires_grad=True)
    weights = torch.tensor([[0.5, 2.0, torch.nan]])
    token = corrected(TokenLoss(x.where(mask, 0.0), {"clipped": Metric(mask.float(), mask)}), weights, mask)
    assert token.loss.tolist() == [[0.5, -4.0, 0.0]] and set(token.metrics) == {"clipped", "correction"}
    token.loss.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0.5, 2.0, 0.0]]


def test_a_weight_on_a_bound_is_kept() -> None:
    """A log ratio of 0 is a weight of exactly 1."""
    old, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    for bounds in ({"low": 1.0, "high": 9.0}, {"low": 0.1, "high": 1.0}, {"low": 1.0, "high": 1.0}):
        assert icepop(old, old, mask, **bounds).all()
        for level in LEVELS:
            assert mis(old, old, mask, level=level, **bounds).all()
    beyond = math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)
    old = old.double()
    for bounds in ({"low": beyond[0], "high": 9.0}, {"low": 0.1, "high": beyond[1]}):
        assert not icepop(old, old, mask, **bounds).any() and not mis(old, old, mask, **bounds).any()


def test_a_lower_bound_above_the_upper_one_is_an_error() -> None:
    """Of torch's clamp the upper bound would win, and a mask would leave no token."""
    x, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="floor 3 is above cap 2"):
        tis(x, x, mask, floor=3.0, cap=2.0)
    with pytest.raises(ValueError, match="low 3 is above high 2"):
        mis(x, x, mask, low=3.0, high=2.0)
    with pytest.raises(ValueError, match=r"low 0.5 is above high 0.25"):
        icepop(x, x, mask, high=0.25)


@each("correction")
@pytest.mark.parametrize("loss", [grpo, gspo], ids=["grpo", "gspo"])
def test_nan_in_a_correction_is_nan_in_the_gradient_of_the_loss_that_it_weighs(row: Loss, loss: Loss) -> None:
    for setting in settings(row):
        batch = setting.draw(spread=0.01)
        mask, old = batch["mask"], batch["old_logprobs"]
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64).unsqueeze(1)
        where = one_of_each_row(mask)
        for name in float_tensors(batch):
            weights = setting.result(batch | {name: poisoned_at(batch[name], where)})
            logprobs = old.clone().requires_grad_()  # no token is clipped
            corrected(loss(logprobs, old, advantages, mask), weights, mask).loss.sum().backward()
            assert all(logprobs.grad[token].isnan() for token in where), f"NaN in {name}: {logprobs.grad}"
