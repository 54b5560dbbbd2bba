"""SkyRL's example of a custom policy loss: what is wrong with it, and that `check --as skyrl` says so."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.testing.conventions import check_as

LAWS = ("micro_batches_and_ranks_leave_the_gradient_alone", "masked_tokens_have_no_influence")


def of_the_example(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Any = None
) -> tuple[Tensor, dict[str, float]]:
    """What examples/train/algorithms/custom_policy_loss computes, at NovaSky-AI/SkyRL@a956457."""
    return (-log_probs * advantages).mean(), {"clip_ratio": 0.0}


def with_rollout(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Any = None,
    rollout_logprobs: Any = None,
) -> tuple[Tensor, dict[str, float]]:
    """The same, with the parameter that SkyRL passes."""
    return of_the_example(log_probs, old_log_probs, advantages, config, loss_mask)


def summed(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Any = None,
    rollout_logprobs: Any = None,
) -> tuple[Tensor, dict[str, float]]:
    """What it should compute."""
    return torch.where(loss_mask > 0, -log_probs * advantages, 0.0).sum(), {"clip_ratio": 0.0}


@pytest.mark.parametrize("lengths, times", [([6, 4, 5, 2], 17), ([600, 40, 500, 20], 1160)])
def test_its_mean_divides_what_skyrl_has_divided(lengths: list[int], times: int) -> None:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    advantages = upstream.divided(torch.ones(mask.shape).double(), mask, "token_mean", 0, [4])
    logprobs = -torch.ones(mask.shape).double()
    given = (logprobs, logprobs, advantages, None, mask.double(), None)
    assert float(summed(*given)[0]) == pytest.approx(1.0)
    assert float(with_rollout(*given)[0]) == pytest.approx(1 / times)


def test_the_check_says_both_faults_of_the_example() -> None:
    masked, cut = check_as(with_rollout, "skyrl", LAWS).outcomes
    assert cut.status == masked.status == "failed"
    assert "a mean of B rows of T tokens is B T times too small" in cut.cause
    assert [one.status for one in check_as(summed, "skyrl", LAWS).outcomes] == ["passed", "passed"]
    outcomes = check_as(of_the_example, "skyrl", LAWS[:1]).outcomes
    assert "unexpected keyword argument 'rollout_logprobs'" in "".join(one.detail for one in outcomes)
