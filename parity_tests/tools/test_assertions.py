"""The comparison that every parity test uses: which differences it accepts and which it does not."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from composer_plugins.testing.assertions import assert_parity, tolerance
from parity_tests.rigs.recorded import assert_equals

NUMBERS = torch.tensor([[1.5, -0.25, 3.0], [-7.0, 0.0, 2.0]], dtype=torch.float64)
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64)


def changed(index: tuple[int, ...], value: float, right: Tensor = NUMBERS) -> tuple[Tensor, Tensor]:
    wrong = right.clone()
    wrong[index] = value
    return wrong, right


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(NUMBERS * (1 + 1e-11), NUMBERS, id="relative"),
        pytest.param(*changed((1, 0), -7.0 * (1 + 1e-11)), id="relative-in-one-place"),
        pytest.param(*changed((0, 1), 0.25), id="sign"),
        pytest.param(NUMBERS * 6 / 5, NUMBERS, id="denominator"),
        pytest.param(*changed((1, 1), torch.nan), id="nan"),
        pytest.param(*changed((1, 1), torch.inf), id="infinity"),
        pytest.param(*changed((0,), 1.0, SPECIAL), id="no-nan"),
        pytest.param(*changed((1,), -torch.inf, SPECIAL), id="sign-of-infinity"),
        pytest.param(*changed((2,), -1e308, SPECIAL), id="large-for-infinity"),
        pytest.param(*changed((1, 1), 1e-11), id="something-for-zero"),
        pytest.param(NUMBERS[0].abs() * 1e-300, torch.zeros(3).double(), id="tiny-where-all-are-zero"),
        pytest.param(NUMBERS[:1], NUMBERS, id="shape"),
        pytest.param(NUMBERS.unsqueeze(0), NUMBERS, id="shape-that-would-broadcast"),
    ],
)
def test_a_planted_difference_is_found(wrong: Tensor, right: Tensor) -> None:
    assert_parity(right, right.clone(), terms=6)
    for ours, theirs in ((wrong, right), (right, wrong)):
        with pytest.raises(AssertionError):
            assert_parity(ours, theirs, terms=6)


def test_another_order_of_a_sum_is_accepted() -> None:
    terms = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    backwards = sum(terms.flip(0).tolist())
    assert terms.sum() != backwards
    assert_parity(terms.sum(), terms.new_tensor(backwards), terms=1000, magnitude=float(terms.abs().max()))


def test_tolerance_stays_below_1e_12_of_the_largest_term_for_500_terms() -> None:
    assert tolerance(torch.float64, terms=500, magnitude=1.0) < 1e-12


@pytest.mark.parametrize(("loss", "gradient"), [(1, 1), (1 + 1e-11, 1), (1, 1 + 1e-11), (-1, 1)])
def test_a_loss_is_compared_by_value_and_gradient(loss: float, gradient: float) -> None:
    logprobs = NUMBERS.clone().requires_grad_()
    token_loss = logprobs.square()
    theirs = {"loss": NUMBERS.square().mean() * loss, "grad_log_prob": 2 * NUMBERS / 6 * gradient}
    case = {name: x.tolist() for name, x in theirs.items()}
    with nullcontext() if loss == gradient else pytest.raises(AssertionError):
        assert_equals(case, token_loss.mean(), token_loss, logprobs)
