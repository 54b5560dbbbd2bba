"""A loss or a metric of a channel that is not finite ends the run, before the policy's weights follow it."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from composer_plugins.errors import DataError
from composer_plugins.kernels.policy import grpo
from composer_plugins.kernels.types import Metric, TokenLoss
from parity_tests.rigs import tiny

TEACHER = "look for weights that are not finite in the teacher of this run"
POLICY = "lower learning_rate or set max_grad_norm"


def overflowing(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, scale: float = 1.0
) -> TokenLoss:
    """A loss that is finite, with a metric that is not."""
    token = grpo(logprobs, old_logprobs, advantages, mask)
    return TokenLoss(scale * token.loss, {"size": Metric(torch.full_like(token.loss, torch.inf), mask)})


def poison(model: Any) -> None:
    """Set one weight of a model to NaN."""
    model.lm_head.weight.data[4, 0] = torch.nan


@pytest.mark.parametrize(
    ("options", "poisoned", "message"),
    [
        (
            {"hint_weight": 1.0},
            lambda made: made._hint.teacher.model,
            r"the hint channel, step 1: its loss is nan, because \d+ of \d+ values of teacher_logprobs are "
            rf"not finite, the first \(nan\) at row \d+, token 0; {TEACHER}",
        ),
        (
            {"hint_weight": 1.0, "fused_linear": False},
            lambda made: made._hint.teacher.model,
            f"its loss is nan, because .* values of teacher_logprobs .*; {TEACHER}",
        ),
        (
            {"hint_weight": 1.0, "hint_divergence": "sampled_token"},
            lambda made: made._hint.teacher.model,
            f"its loss is nan, because .* values of teacher_logprobs .*; {TEACHER}",
        ),
        (
            {"replay_weight": 1.0},
            lambda made: made._replay.reference.model,
            "the replay channel, step 1: its loss is nan, because .* values of ref_chosen .*the reference",
        ),
        (
            {"policy": "grpo"},
            lambda made: made.model,
            f"the policy channel, step 1: its loss is nan, because .* values of logprobs .*; {POLICY}",
        ),
        (
            {"replay_weight": 1.0, "replay_loss": "simpo"},
            lambda made: made.model,
            f"the replay channel, step 1: its loss is nan, because .* values of chosen .*; {POLICY}",
        ),
        (
            {"policy": f"{__name__}:overflowing"},
            None,
            "the policy channel, step 1: its metric 'size' is inf, and all its inputs are finite, so it o",
        ),
    ],
    ids=("hint", "hint from logits", "hint, sampled token", "reference", "policy", "simpo", "metric"),
)
def test_the_run_ends_with_channel_step_and_input(
    options: dict[str, Any], poisoned: Any, message: str
) -> None:
    made = tiny.trainer(**options)
    before = {name: weight.clone() for name, weight in made.model.named_parameters()}
    if poisoned is not None:
        poison(poisoned(made))
    with pytest.raises(DataError, match=message):
        made.train()
    if poisoned is None or poisoned(made) is not made.model:
        assert all(weight.equal(before[name]) for name, weight in made.model.named_parameters())


def test_advantages_that_are_not_finite_are_named_in_the_step_in_which_they_come() -> None:
    made = tiny.trainer(policy="gspo", max_steps=2)
    made.train()
    inputs = tiny.batch(made)
    inputs["advantages"][3] = -torch.inf
    message = r"step 3: its loss is -?(nan|inf), because .* of advantages .* \(-inf\) at row 3, token 0; look"
    with pytest.raises(DataError, match=message):
        made._compute_loss(made.model, inputs)


def test_a_masked_value_that_is_not_finite_is_no_error() -> None:
    made = tiny.trainer(policy="grpo")
    inputs = tiny.batch(made)
    inputs["advantages"][3] = torch.nan
    inputs["completion_mask"][3] = 0
    assert made._compute_loss(made.model, inputs).isfinite()


def test_a_process_whose_inputs_are_finite_raises_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it waits for them: the sums are those of all processes."""
    made = tiny.trainer(policy="grpo")
    inputs = tiny.batch(made)
    monkeypatch.setattr(Accelerator, "reduce", lambda _, sums, reduction: sums * torch.nan)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(
        DataError, match="all its inputs are finite, unless they are of another process, which"
    ):
        made._compute_loss(made.model, inputs)
