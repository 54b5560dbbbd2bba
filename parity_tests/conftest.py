"""What every test shares: Hypothesis' profiles, one thread, and which files need TRL."""

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from parity_tests.support import golden

# No deadline: the first call into torch outlasts Hypothesis' 200 ms, and a slower second machine
# would make a test flaky. CI draws the same examples each time, and prints how to repeat one.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# The tensors here are tiny: a second thread costs more than it saves, and sums in another order.
torch.set_num_threads(1)

# Nothing here reaches a hub. TRL warns of rollout_func, with which the tests script their rollouts.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1")

# What the tests of a framework import, beside it: without it, its folders are not collected.
FRAMEWORKS = {"trl": ("trl", "peft", "matplotlib"), "verl": ("verl",)}
MISSING = {name: gone for name, all_ in FRAMEWORKS.items() if (gone := [m for m in all_ if not find_spec(m)])}
collect_ignore = [f"{folder}/{name}" for name in MISSING for folder in ("adapters", "live")]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--golden-dir`: run the golden claims on other recordings."""
    parser.addoption("--golden-dir", type=Path, help="read golden numbers from here (with -m golden)")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: a claim reads its cases then."""
    if (where := config.getoption("--golden-dir")) is not None:
        golden.use(where)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of another golden directory: what it leaves unchecked."""
    if absent := golden.not_checked():
        terminalreporter.write_line(
            f"golden: {len(absent)} files not in {golden.directory}, so not checked: {', '.join(absent)}"
        )


def pytest_report_header() -> list[str]:
    """Say which tests this environment cannot run."""
    return [
        f"{name}: no {', '.join(MISSING[name])}, so adapters/{name} and live/{name} are not collected "
        f"(nox -s {name} runs them)"
        if name in MISSING
        else f"{name}: installed, so adapters/{name} and live/{name} are collected"
        for name in FRAMEWORKS
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A run of verl's main_ppo with these overrides; each once, and no process of it lives after it."""
    from parity_tests.support.verl_cpu.runner import run
    from parity_tests.support.verl_cpu.trained import STEPS

    @cache
    def once(*overrides: str) -> Any:
        done = run(tmp_path_factory.mktemp("main_ppo"), *overrides, steps=STEPS)
        assert not done.left
        return done

    return once
