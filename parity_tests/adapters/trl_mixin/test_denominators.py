"""A policy loss named alone is reduced as its paper does; a loss_type that is set chooses the denominator.

Every denominator is one of the whole batch: the gradient depends neither on micro-batches nor on ranks.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.conformance.reductions import kernel
from parity_tests.rigs import by_rows, sharded, tiny

LENGTH = 5  # tiny.trainer's max_completion_length

Rows = list[Tensor]  # the losses of each completion's tokens, without padding


def tokens(rows: Rows) -> int:
    return sum(len(row) for row in rows)


def total(rows: Rows) -> Tensor:
    return torch.stack([row.sum() for row in rows]).sum()


REDUCTIONS: dict[str, Callable[[Rows], Tensor]] = {
    "per sequence": lambda rows: torch.stack([row.sum() / len(row) for row in rows]).sum() / len(rows),
    "constant length": lambda rows: total(rows) / LENGTH / len(rows),
    "all tokens": lambda rows: total(rows) / tokens(rows),
    "sequence sum": lambda rows: total(rows) / len(rows),
    "sum": total,
}
PAPERS = {"grpo": "per sequence", "gspo": "per sequence", "dr_grpo": "constant length", "dapo": "all tokens"}
PAPERS |= {"cispo": "all tokens", "luspo": "sequence sum", "importance_sampling": "sum"}
# For each of them a loss_type that divides otherwise.
OTHERS = {"grpo": "dr_grpo", "gspo": "dapo", "dr_grpo": "grpo"}
OTHERS |= {"dapo": "luspo", "cispo": "grpo", "luspo": "dapo"}


def policy_by_rows(made: Any, inputs: dict[str, Any], policy: str, reduction: str) -> Tensor:
    """The policy loss of a batch, from one forward pass per completion without padding."""
    rows: Rows = []
    for i, mask in enumerate(inputs["completion_mask"].bool()):
        logprobs = by_rows.logprobs(made.model, inputs, i)[None]
        old, advantage = inputs["old_per_token_logps"][i][mask][None], inputs["advantages"][i].view(1, 1)
        everything = torch.ones_like(logprobs, dtype=torch.bool)
        rows.append(kernel("policy", policy)(logprobs, old, advantage, everything).loss[0])
    return REDUCTIONS[reduction](rows)


@pytest.mark.parametrize(("policy", "loss_type"), [*((policy, None) for policy in PAPERS), *OTHERS.items()])
def test_a_policy_is_reduced_as_in_its_paper_or_by_loss_type(policy: str, loss_type: str | None) -> None:
    made = tiny.trainer(policy=policy, loss_type=loss_type, num_iterations=2)
    inputs = tiny.batch(made)
    torch.manual_seed(0)  # ratios away from 1, on both sides of a clip
    noise = 0.3 * torch.randn_like(inputs["old_per_token_logps"])
    inputs = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"] + noise}
    value, gradient = tiny.loss_and_gradient(made, inputs)
    expected = policy_by_rows(made, inputs, policy, PAPERS[loss_type or policy])
    flat = tiny.flat_gradient(made, expected)
    assert float(value) == pytest.approx(expected.item(), rel=1e-5, abs=tiny.FLOAT32)
    assert tiny.relative_difference(flat, gradient) <= tiny.FLOAT32


@pytest.mark.parametrize("name", (*sharded.PLAIN, *sharded.GATHERED))
def test_the_gradient_does_not_depend_on_gradient_accumulation(name: str) -> None:
    case = {**sharded.CASES[name], "max_steps": 1}
    sizes = ({"per_device_train_batch_size": 16 // n, "gradient_accumulation_steps": n} for n in (1, 4))
    whole, cut = (tiny.gradients(tiny.trainer(**case | size)) for size in sizes)
    assert tiny.relative_difference(whole[0], cut[0]) <= tiny.FLOAT32


def test_an_optimizer_step_on_half_of_the_generated_completions_counts_their_tokens_as_trl_does() -> None:
    """TRL before 1.10 divides by the tokens of all completions, which halves its gradient."""
    half = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    ours = tiny.gradients(tiny.trainer(policy="dapo", **half))[0]
    theirs = tiny.gradients(tiny.trainer(policy="trl", loss_type="dapo", **half))[0]
    factor = 0.5 if upstream.release() < (1, 10) else 1.0
    assert tiny.relative_difference(factor * ours, theirs) <= tiny.FLOAT32


def test_a_copied_config_has_no_loss_type_that_nobody_set() -> None:
    gspo = replace(tiny.config(), policy="gspo", generation_batch_size=None)
    choice = gspo.resolved.policy
    assert choice is not None and gspo.resolved.mode == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "1 * policy TRL's own, loss_type=dapo"),
        (
            {"policy": "gspo", "policy_weight": 2.0},
            "2 * policy gspo(clip_low=0.0003, clip_high=0.0004), the mean over completions of the mean over "
            "their tokens (as in the paper: loss_type is not set)",
        ),
        (
            {
                **{"policy": "grpo@trl", "loss_type": "dr_grpo", "hint_weight": 0.5},
                "policy_params": {"clip_high": 0.3},
            },
            "1 * policy grpo@trl(clip_low=0.2, clip_high=0.3), the mean over completions of their sum over "
            "tokens / max_completion_length (set by loss_type=dr_grpo) + 0.5 * hint jsd(beta=0.5, ",
        ),
    ],
)
def test_the_log_names_the_loss(caplog: pytest.LogCaptureFixture, options: dict[str, Any], line: str) -> None:
    caplog.set_level(logging.INFO, logger="composer_plugins")
    tiny.trainer(**options)
    first, *second = [one.getMessage() for one in caplog.records if one.name == "composer_plugins"]
    assert first.startswith(f"composer loss = {line}")
    unread = "TRL's options for the parameters of its own policy losses are not read"
    assert [one.endswith(unread) for one in second] == [True] * ("policy" in options)
