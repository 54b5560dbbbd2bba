"""What a preference loss is, whoever implements it: properties, hazards and plain numbers."""

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from composer_plugins.kernels.preference import dpo, kto_reference_point, logistic, sequence_logprobs, simpo
from composer_plugins.kernels.types import PairLoss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import token_batches


def tensors(*values: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Scores of one pair each."""
    return [torch.tensor([value], dtype=dtype) for value in values]


def cross_entropy(h: float, epsilon: float) -> float:
    """Of the choice with log-odds h against a label that is wrong with chance epsilon."""
    return (1 - epsilon) * math.log1p(math.exp(-h)) + epsilon * math.log1p(math.exp(h))


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_simpo_demands_a_margin_and_has_two_links(epsilon: float) -> None:
    settings = {"beta": 2.5, "gamma_beta_ratio": 0.5, "label_smoothing": epsilon}
    h = 2.5 * (-0.4 + 1.0) - 2.5 * 0.5
    sigmoid = simpo(*tensors(-0.4, -1.0), **settings)
    hinge = simpo(*tensors(-0.4, -1.0), **settings, link="hinge")
    assert sigmoid.loss.item() == pytest.approx(cross_entropy(h, epsilon), rel=1e-14)
    assert hinge.loss.item() == pytest.approx(1 - h, rel=1e-14)


def test_defaults_are_those_of_the_papers() -> None:
    scores = tensors(-1.0, -2.0, -1.5, -1.75)
    assert dpo(*scores).loss.equal(dpo(*scores, beta=0.1, label_smoothing=0.0).loss)
    assert simpo(*scores[:2]).loss.equal(simpo(*scores[:2], beta=2.0, gamma_beta_ratio=0.25).loss)


def test_chosen_may_beat_rejected_and_still_lose_to_the_reference() -> None:
    ours = dpo(*tensors(-1.0, -2.0, -1.0, -4.0), beta=0.5)
    assert ours.loss > math.log(2)
    assert {name: metric.value.item() for name, metric in ours.metrics.items()} == {
        "rewards/chosen": 0.0,
        "rewards/rejected": 1.0,
        "rewards/margins": -1.0,
        "rewards/accuracies": 0.0,
    }


def test_simpo_rewards_are_scores_times_beta_and_leave_out_the_margin() -> None:
    ours = simpo(*tensors(-1.0, -1.25), beta=2.0, gamma_beta_ratio=10.0)
    assert {name: metric.value.item() for name, metric in ours.metrics.items()} == {
        "rewards/chosen": -2.0,
        "rewards/rejected": -2.5,
        "rewards/margins": 0.5,
        "rewards/accuracies": 1.0,
    }


@pytest.mark.parametrize("ours", [dpo(*tensors(-1.0, -1.0, -2.0, -2.0)), simpo(*tensors(-1.0, -1.0))])
def test_a_tie_is_no_accuracy_and_metrics_count_every_pair_detached(ours: PairLoss) -> None:
    assert not ours.metrics["rewards/accuracies"].value.any()
    for metric in ours.metrics.values():
        assert metric.where.dtype == torch.bool and metric.where.all()


@pytest.mark.parametrize("h", [-1e4, 1e4])
def test_label_smoothing_keeps_a_pull_on_a_saturated_pair(h: float) -> None:
    x = torch.tensor([h], requires_grad=True)
    loss = logistic(x, 0.1)
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert loss.item() == pytest.approx(1e4 * (0.1 if h > 0 else 0.9))
    assert slope.item() == pytest.approx(0.1 if h > 0 else -0.9)


@given(token_batches())
def test_sequence_logprobs_are_sums_and_averages_of_unmasked_tokens(batch: dict[str, Tensor]) -> None:
    """Whatever the others hold; an empty row gives 0."""
    logprobs, mask = batch["logprobs"], batch["mask"]
    unmasked = [row[keep].tolist() for row, keep in zip(logprobs, mask, strict=True)]
    poisoned = torch.where(mask, logprobs, math.nan).requires_grad_()
    for average in (False, True):
        want = [math.fsum(row) / (max(len(row), 1) if average else 1) for row in unmasked]
        ours = sequence_logprobs(poisoned, mask, average=average)
        assert_parity(ours, torch.tensor(want, dtype=torch.float64), terms=logprobs.shape[-1])
        (slope,) = torch.autograd.grad(ours.sum(), poisoned)
        share = mask.sum(-1, keepdim=True).clamp(min=1) if average else 1
        assert torch.equal(slope, mask.double() / share)


def test_sequence_logprobs_of_a_packed_sequence_in_half_precision_sum_in_float32() -> None:
    logprobs = torch.full((1000,), -0.01, dtype=torch.bfloat16)
    total = sequence_logprobs(logprobs, torch.ones(1000, dtype=torch.bool))
    assert total.shape == () and total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * logprobs[0].item(), rel=1e-5)


def test_an_infinite_margin_without_smoothing_costs_nothing_or_everything() -> None:
    """A rejected completion that the policy cannot write: h = inf, and 0 * inf must not be NaN."""
    chosen, rejected = torch.tensor([-1.0, -torch.inf]), torch.tensor([-torch.inf, -1.0])
    loss = simpo(chosen, rejected).loss
    assert loss.tolist() == [0.0, torch.inf]


def test_the_reference_point_of_no_completions_is_zero() -> None:
    assert kto_reference_point(torch.zeros(0), torch.zeros(0)) == 0
    ours, reference = torch.tensor([1.0, 2.0]), torch.tensor([0.25, 0.5])
    assert kto_reference_point(ours, reference) == 1.125
    assert kto_reference_point(reference, ours) == 0
