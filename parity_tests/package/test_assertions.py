"""The comparer itself: what it lets pass and what it does not. Every parity test stands on it."""

import pytest
import torch
from torch import Tensor

from parity_tests.support.assertions import assert_loss_parity, assert_parity, tolerance

NUMBERS = torch.tensor([[1.5, -0.25, 3.0], [-7.0, 0.0, 2.0]], dtype=torch.float64)


def planted(index: tuple[int, ...], value: float) -> Tensor:
    wrong = NUMBERS.clone()
    wrong[index] = value
    return wrong


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(NUMBERS * (1 + 1e-11), id="relative-1e-11"),
        pytest.param(planted((1, 0), -7.0 * (1 + 1e-11)), id="relative-1e-11-in-one-place"),
        pytest.param(-NUMBERS, id="sign"),
        pytest.param(planted((0, 1), 0.25), id="sign-in-one-place"),
        pytest.param(NUMBERS * 6 / 5, id="denominator"),
        pytest.param(planted((1, 1), torch.nan), id="nan-in-one-place"),
        pytest.param(planted((1, 1), torch.inf), id="infinity-in-one-place"),
        pytest.param(planted((1, 1), 1e-11), id="something-for-nothing"),
        pytest.param(NUMBERS[:1], id="shape"),
        pytest.param(NUMBERS.unsqueeze(0), id="a-shape-that-would-broadcast"),
    ],
)
def test_comparer_fails_on_a_planted_difference(wrong: Tensor) -> None:
    with pytest.raises(AssertionError):
        assert_parity(wrong, NUMBERS, terms=6)
    with pytest.raises(AssertionError):
        assert_parity(NUMBERS, wrong, terms=6)


def test_comparer_accepts_another_order_of_a_sum() -> None:
    terms = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    backwards = sum(terms.flip(0).tolist())
    largest = float(terms.abs().max())
    assert terms.sum() != backwards
    assert_parity(terms.sum(), terms.new_tensor(backwards), terms=1000, magnitude=largest)


def test_comparer_demands_nan_and_infinity_in_the_same_places() -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64)
    assert_parity(special, special.clone(), terms=1)
    for place in range(3):
        wrong = special.clone()
        wrong[place] = -special.nan_to_num(2.0)[place]
        for ours, theirs in ((wrong, special), (special, wrong)):
            with pytest.raises(AssertionError):
                assert_parity(ours, theirs, terms=1)


def test_comparer_is_exact_where_upstream_is_zero() -> None:
    assert_parity(torch.zeros(2), torch.zeros(2), terms=9)
    with pytest.raises(AssertionError):
        assert_parity(torch.full((2,), 1e-300, dtype=torch.float64), torch.zeros(2), terms=9)


def test_tolerance_stays_below_1e_12_of_the_largest_term_for_500_terms() -> None:
    assert tolerance(torch.float64, terms=500, magnitude=1.0) < 1e-12


@pytest.mark.parametrize("wrong_loss, wrong_gradient", [(1e-11, 0.0), (0.0, 1e-11), (-2.0, 0.0)])
def test_loss_comparer_sees_value_and_gradient(wrong_loss: float, wrong_gradient: float) -> None:
    def compare(loss_factor: float, gradient_factor: float) -> None:
        logprobs = NUMBERS.clone().requires_grad_()
        token_loss = logprobs.square()
        loss, gradient = NUMBERS.square().mean(), 2 * NUMBERS / 6
        assert_loss_parity(
            token_loss.mean(),
            token_loss,
            logprobs,
            theirs=loss * loss_factor,
            their_gradient=gradient * gradient_factor,
        )

    compare(1, 1)
    with pytest.raises(AssertionError):
        compare(1 + wrong_loss, 1 + wrong_gradient)
