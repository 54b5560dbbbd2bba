"""Masking: what is masked has no influence, whatever it holds; saturation instead of overflow."""

import inspect
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.masking import (
    at_least_float32,
    bounded,
    keep,
    masked_mean,
    masked_sum,
    safe_exp,
    with_nan_of,
)
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs.compiled import ran_by_a_link


@pytest.mark.parametrize("reduce", [keep, masked_sum, masked_mean])
@given(batch=token_batches())
def test_masked_entries_have_no_influence_whatever_they_hold(
    reduce: Callable[[Tensor, Tensor], Tensor], batch: dict[str, Tensor]
) -> None:
    x, mask = batch["logprobs"], batch["mask"]
    clean = torch.where(mask, x, 0.0).requires_grad_()
    dirty = with_junk(x, mask).requires_grad_()
    assert torch.equal(reduce(clean, mask), reduce(dirty, mask))
    for y in (clean, dirty):
        reduce(y, mask).sum().backward()
    assert torch.equal(clean.grad, dirty.grad)
    assert not dirty.grad[~mask].any()


@pytest.mark.parametrize("tokens", [3, 0])
def test_mean_of_an_empty_row_is_zero_and_attached_to_the_graph(tokens: int) -> None:
    x = torch.full((2, tokens), torch.nan, requires_grad=True)
    mean = masked_mean(x, torch.zeros(2, tokens, dtype=torch.bool))
    assert mean.tolist() == [0.0, 0.0]
    mean.sum().backward()
    assert not x.grad.any()


def test_only_half_precision_is_upcast() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert at_least_float32(torch.ones(1, dtype=dtype)).dtype == torch.float32
    assert at_least_float32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exp_saturates_below_overflow_with_no_gradient_there(dtype: torch.dtype) -> None:
    x = torch.tensor([1e4, torch.inf, -1e4], dtype=dtype, requires_grad=True)
    y = safe_exp(x)
    assert (y * 1e4).isfinite().all()
    y.sum().backward()
    assert not x.grad.any()


def test_exp_is_exact_up_to_its_limit() -> None:
    values = [-700.0, -20.0, -1e-9, 0.0, 1e-9, 1.0, 20.0, 650.0]
    ours = safe_exp(torch.tensor(values, dtype=torch.float64))
    for one, value in zip(ours, values, strict=True):
        assert_parity(one, ours.new_tensor(math.exp(value)), terms=1)


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (None, 1.0), (-1.0, None)])
def test_a_bound_is_torchs_clamp_whose_gradient_passes_a_nan(ends: tuple[float | None, float | None]) -> None:
    values = torch.tensor([-torch.inf, -2, -1, -0.0, 0.5, 1, 3, torch.inf, torch.nan], dtype=torch.float64)
    ours, theirs = values.clone().requires_grad_(), values.clone().requires_grad_()
    one, other = bounded(ours, *ends), theirs.clamp(*ends)
    assert torch.equal(one[:-1], other[:-1]) and one[-1].isnan()
    one.sum().backward()
    other.sum().backward()
    assert torch.equal(ours.grad[:-1], theirs.grad[:-1])
    assert (ours.grad[-1], theirs.grad[-1]) == (1, 0)


@pytest.mark.slow  # it compiles with a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.13's own compiler
def test_a_nan_of_another_tensor_survives_eager_and_compiled(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The compiler replaces products with 0, and the gradient beyond a bound is 0 unless the value is NaN."""
    if ran_by_a_link(request, tmp_path):
        return

    def bound(x: Tensor, other: Tensor) -> Tensor:
        return inspect.unwrap(bounded)(inspect.unwrap(with_nan_of)(x, other), high=0.5)

    other = torch.tensor([[1.0], [torch.nan], [torch.inf], [-torch.inf]])
    for function in (bound, torch.compile(bound, fullgraph=True)):
        x = torch.tensor([0.25, 1.0]).expand(4, 2).clone().requires_grad_()
        y = function(x, other)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert y[0].tolist() == [0.25, 0.5] and y[1:].isnan().all()
        assert gradient[0].tolist() == [1, 0] and gradient[1:].all()
