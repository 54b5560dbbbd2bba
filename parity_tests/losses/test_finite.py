"""The error for a loss that is not finite names the input that it comes from."""

import pytest
import torch

from composer_plugins.errors import DataError
from composer_plugins.losses.finite import FiniteCheck, loss_not_finite, not_finite

MASK = torch.tensor([[True, True, False], [True, True, True]])


def with_nan(row: int, token: int) -> torch.Tensor:
    values = torch.zeros(2, 3)
    values[row, token] = torch.nan
    return values


@pytest.mark.parametrize(
    ("advantages", "found"),
    [
        (with_nan(1, 2), "1 of 5 values of advantages are not finite, the first (nan) at row 1, token 2"),
        (with_nan(0, 2), ""),  # masked out
        (
            torch.tensor([[0.0], [torch.inf]]),  # one per row
            "3 of 5 values of advantages are not finite, the first (inf) at row 1, token 0",
        ),
    ],
)
def test_an_input_that_is_not_finite_is_found_with_its_place(advantages: torch.Tensor, found: str) -> None:
    given = {"logprobs": torch.zeros(2, 3), "advantages": advantages, "mask": MASK}
    assert [*not_finite(given)] == ([("advantages", found)] if found else [])


@pytest.mark.parametrize("name", ["advantages", "logprobs", "rollout_logprobs"])
def test_the_error_names_the_first_input_that_is_not_finite(name: str) -> None:
    check = FiniteCheck("policy 'grpo'")
    given = {one: torch.zeros(2, 3) for one in ("logprobs", "rollout_logprobs", "advantages")}
    check(torch.tensor(1.0), {**given, "mask": MASK})
    with pytest.raises(
        DataError, match=f"^policy 'grpo': the loss is not finite, because {name} is not finite"
    ):
        check(torch.tensor(torch.nan), given | {name: with_nan(0, 1), "mask": MASK})
    check(torch.tensor(1.0), given | {name: with_nan(0, 1), "mask": MASK})  # a loss that left it out


def test_a_loss_that_overflows_is_said_to() -> None:
    with pytest.raises(DataError, match="all its inputs are, so it overflows; look at the norm"):
        FiniteCheck("loss")(torch.tensor(torch.inf), {"logprobs": torch.zeros(2, 3), "mask": MASK})
    assert "look at the rewards" in str(loss_not_finite("loss", "advantages"))
