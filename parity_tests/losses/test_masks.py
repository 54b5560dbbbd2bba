"""A mask that a framework passes is 0 and 1, or weights where the framework has such."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.errors import DataError
from composer_plugins.losses.masks import boolean_mask, token_weights

HALF = torch.tensor([[1.0, 0.5], [0.0, 1.0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_of_0_and_1_is_taken_in_any_dtype(dtype: torch.dtype) -> None:
    wanted = torch.tensor([[True, False], [False, True]])
    for check in (True, False):
        assert torch.equal(boolean_mask("mask", wanted.to(dtype), check=check), wanted)


@pytest.mark.parametrize(("wrong", "shown"), [(0.5, "0.5"), (-1.0, "-1"), (torch.nan, "nan"), (2.0, "2")])
def test_another_number_in_a_mask_is_an_error(wrong: float, shown: str) -> None:
    given = torch.tensor([[1.0, 0.0, wrong]])
    with pytest.raises(DataError, match=f"response_mask: it holds {shown}, and a mask holds 0 and 1; pass"):
        boolean_mask("response_mask", given, check=True)
    boolean_mask("response_mask", given, check=False)  # no wait for the device


@pytest.mark.parametrize("wrong", [-0.5, torch.nan, torch.inf])
def test_a_weight_is_finite_and_at_least_0(wrong: float) -> None:
    assert torch.equal(token_weights("loss_mask", HALF, check=True), HALF)
    with pytest.raises(DataError, match=f"loss_mask: it holds {wrong:g}, and a weight is"):
        token_weights("loss_mask", torch.tensor([[1.0, wrong]]), check=True)


@pytest.mark.parametrize("function", [boolean_mask, token_weights])
def test_a_mask_is_a_tensor(function: Any) -> None:
    assert isinstance(function("mask", torch.ones(2), check=True), Tensor)
    with pytest.raises(DataError, match="mask: it is of type list; pass a tensor"):
        function("mask", [1, 0], check=True)
