"""The composer loss is a weighted sum, and a channel that is absent or of weight 1 is left alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch import Tensor

from composer_plugins.kernels.composer import composer

weights = st.floats(-10, 10)
values = st.floats(-1e3, 1e3)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


@given(st.tuples(values, values, values), st.tuples(weights, weights, weights))
@example((1.0, 2.0, 3.0), (0.0, 0.0, 0.0))  # with a gradient: every rank must reach the same parameters
def test_value_and_gradient_are_the_weighted_sum(
    channels: tuple[float, ...], weights: tuple[float, ...]
) -> None:
    policy, hint, replay = map(scalar, channels)
    names = ("policy_weight", "hint_weight", "replay_weight")
    total = composer(policy, hint, replay, **dict(zip(names, weights, strict=True)))
    want = sum(weight * channel for weight, channel in zip(weights, channels, strict=True))
    assert total.item() == pytest.approx(want, rel=1e-14, abs=1e-11)
    slopes = torch.autograd.grad(total, (policy, hint, replay))
    assert [slope.item() for slope in slopes] == list(weights)


@pytest.mark.parametrize("absent", [(), ("hint",), ("replay",), ("hint", "replay")])
def test_a_weight_is_one_by_default_and_a_channel_that_is_none_is_absent_whatever_its_weight(
    absent: tuple[str, ...],
) -> None:
    channels = {"policy": scalar(1.0), "hint": scalar(10.0), "replay": scalar(100.0)}
    want = sum(x.item() for name, x in channels.items() if name not in absent)
    total = composer(**channels | dict.fromkeys(absent), **{f"{name}_weight": 7.0 for name in absent})
    assert total.item() == want


def test_the_policy_alone_is_the_very_same_tensor() -> None:
    """So that a trainer with the plugin, and no other channel, computes what it did before, bit for bit."""
    policy = scalar(0.1)
    assert composer(policy) is policy
