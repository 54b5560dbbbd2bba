"""A policy loss named alone is reduced as its paper does; a loss_type that is set chooses the denominator.

Every denominator is one of the whole batch: the gradient depends neither on micro-batches nor on ranks.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.conformance.reductions import kernel
from parity_tests.rigs import by_rows, tiny
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.two_ranks import CASES, POLICIES, first_gradients

# The advantages are TRL's here, whichever the paper of the loss has.
pytestmark = pytest.mark.filterwarnings("ignore:scale_rewards. it is 'group'")

FLOAT32 = 1e-6  # sums of a few hundred terms in another order; TRL's fused head computes in float32
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
PAPERS = {
    "grpo": "per sequence",
    "gspo": "per sequence",
    "dr_grpo": "constant length",
    "dapo": "all tokens",
    "cispo": "all tokens",
    "luspo": "sequence sum",
    "importance_sampling": "sum",
}
# For each of them a loss_type that divides otherwise.
OTHERS = {
    "grpo": "dr_grpo",
    "gspo": "dapo",
    "dr_grpo": "grpo",
    "dapo": "luspo",
    "cispo": "grpo",
    "luspo": "dapo",
}


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
def test_a_policy_is_reduced_as_its_paper_does_unless_loss_type_is_set(
    policy: str, loss_type: str | None
) -> None:
    made = tiny.trainer(policy=policy, loss_type=loss_type, num_iterations=2)
    inputs = tiny.batch(made)
    torch.manual_seed(0)  # ratios away from 1, on both sides of a clip
    noise = 0.3 * torch.randn_like(inputs["old_per_token_logps"])
    inputs = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"] + noise}
    value, gradient = tiny.loss_and_gradient(made, inputs)
    expected = policy_by_rows(made, inputs, policy, PAPERS[loss_type or policy])
    flat = tiny.flat_gradient(made, expected)
    assert float(value) == pytest.approx(expected.item(), rel=1e-5, abs=FLOAT32)
    assert tiny.relative_difference(flat, gradient) <= FLOAT32


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gradient_does_not_depend_on_gradient_accumulation(case: dict[str, Any]) -> None:
    whole = tiny.gradients(tiny.trainer(**case))
    cut = tiny.gradients(tiny.trainer(per_device_train_batch_size=4, gradient_accumulation_steps=4, **case))
    assert tiny.relative_difference(whole[0], cut[0]) <= FLOAT32


def test_an_optimizer_step_on_half_of_the_generated_completions_counts_their_tokens_as_trl_does() -> None:
    """TRL before 1.10 divides by the tokens of all completions, which halves its gradient."""
    half = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    ours = tiny.gradients(tiny.trainer(policy="dapo", **half))[0]
    theirs = tiny.gradients(tiny.trainer(policy="trl", loss_type="dapo", **half))[0]
    factor = 1.0 if upstream.counts_tokens_of_the_step() else 0.5
    assert tiny.relative_difference(factor * ours, theirs) <= FLOAT32


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path: Path) -> None:
    """One launch for all cases, since most of the time is the start of two processes."""
    assert set(POLICIES) == set(PAPERS)
    found = tmp_path / "gradients.pt"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    # --multi_gpu is the launcher that starts torch.distributed; use_cpu in the config makes it gloo.
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0"]
    launch += ["-m", "parity_tests.rigs.two_ranks", str(found)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("composer loss = ") == len(CASES), "not the main process alone logs its loss"
    one, two = first_gradients(ranks=1), torch.load(found)
    assert two.pop("ranks") == 2
    differences = {case: tiny.relative_difference(one[case], two[case]) for case in CASES}
    assert max(differences.values()) <= FLOAT32, differences


@pytest.mark.parametrize("loss_type", [None, "dr_grpo"])
def test_trls_kl_has_the_denominator_of_our_policy(tmp_path: Path, loss_type: str | None) -> None:
    """beta > 0 with its default bias correction, whose ratio TRL computes under zeroed advantages.

    Two steps: TRL's fused head is float32, the two terms are added in another order, and each optimizer
    step multiplies that difference.
    """
    tiny.model(torch.float64).save_pretrained(tmp_path)
    options = {
        "policy_model": str(tmp_path),
        "model_init_kwargs": {"dtype": torch.float64},
        "max_steps": 2,
        "num_iterations": 2,
        "beta": 0.5,
        "learning_rate": 3e-2,
    }
    theirs = tiny.gradients(tiny.trainer(**options, loss_type=loss_type or "grpo"))
    ours = tiny.gradients(tiny.trainer(policy="grpo", **options, loss_type=loss_type))
    assert max(map(tiny.relative_difference, theirs, ours)) <= FLOAT32


def test_a_copied_config_has_no_loss_type_that_nobody_set() -> None:
    gspo = replace(tiny.config(), policy="gspo", generation_batch_size=None)
    choice = gspo.resolved.policy
    assert choice is not None and gspo.resolved.mode == "seq-mean-token-mean"


def test_without_a_policy_of_ours_loss_type_is_trls() -> None:
    """Not set it is TRL's default; set, it is TRL's own loss of that name."""
    assert tiny.trainer().loss_type == "dapo"
    assert tiny.trainer(loss_type="cispo").loss_type == "cispo"


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
            {"policy": "grpo@trl", "loss_type": "dr_grpo", "epsilon_high": 0.3, "hint_weight": 0.5},
            "1 * policy grpo@trl(clip_low=0.2, clip_high=0.3), the mean over completions of their sum over "
            "tokens / max_completion_length (set by loss_type=dr_grpo) + 0.5 * hint jsd(beta=0.5, ",
        ),
    ],
)
def test_the_log_says_which_loss_runs(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], line: str
) -> None:
    caplog.set_level(logging.INFO, logger="composer_plugins")
    tiny.trainer(**options)
    (record,) = [record for record in caplog.records if record.name == "composer_plugins"]
    assert record.getMessage().startswith(f"composer loss = {line}")
