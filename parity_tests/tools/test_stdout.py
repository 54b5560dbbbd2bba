"""Stdout and the exit status are the command's own, whatever a loss or a framework prints or raises."""

import json
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python

pytestmark = pytest.mark.thorough

NOISE = """
import logging, sys
import torch
from composer_plugins.kernels.types import TokenLoss

def make_noise():
    print("printed")

make_noise()
log = logging.getLogger("noisy")
log.addHandler(logging.StreamHandler(sys.stdout))  # as DeepSpeed does when it is imported
"""
KERNEL = """
def noisy(logprobs, old_logprobs, advantages, mask):
    log.warning("logged")
    make_noise()
    return TokenLoss(torch.where(mask, -advantages * (logprobs - old_logprobs).exp(), 0.0), {})

def ends(logprobs, old_logprobs, advantages, mask):
    raise SystemExit(0)
"""
LAW = "two_calls_give_the_same_result"


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    (tmp_path / "noise.py").write_text(NOISE + KERNEL)
    return tmp_path


def run(folder: Path, *words: str) -> Any:
    """The command line in a process of its own."""
    return python("-m", "composer_plugins", *words, first=folder, cwd=folder)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "noise:noisy", "--only", LAW, "--json"),
        ("explain", "noise:noisy", "--json"),
        ("diff", "noise:noisy", "grpo", "--kind", "policy", "--json"),
        ("check", "noise:noisy", "--only", LAW),
        ("explain", "noise:noisy"),
    ],
    ids=" ".join,
)
def test_stdout_has_nothing_that_a_loss_prints(words: tuple[str, ...], noisy: Path) -> None:
    done = run(noisy, *words)
    assert done.returncode == 0 and "noise:" in done.stdout, done.stderr
    assert "printed\n" in done.stderr and "printed" not in done.stdout
    assert "--json" not in words or json.loads(done.stdout)


@pytest.mark.parametrize("command", [("doctor", "--json"), ("migrate", "--from", "prime-rl", "--to", "verl")])
def test_a_config_names_a_loss_that_prints(command: tuple[str, ...], noisy: Path) -> None:
    config = (ROOT / "recipes" / "prime_rl" / "cispo.toml").read_text()
    (noisy / "rl.toml").write_text(config.replace('"cispo"', '"noise:noisy"'))
    done = run(noisy, *command, "rl.toml")
    assert "noise:noisy" in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert "printed" in done.stderr and "printed" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "noise:ends"),
        ("explain", "noise:ends", "--json"),
        ("diff", "noise:ends", "grpo", "--kind", "policy"),
    ],
    ids=str,
)
def test_a_loss_that_ends_the_program_is_an_error_of_the_loss(words: tuple[str, ...], noisy: Path) -> None:
    done = run(noisy, *words)
    assert done.returncode == 1 and "SystemExit: 0" in done.stderr, done.stderr
    assert "fails on the worked example" in done.stderr
    assert "--json" not in words or json.loads(done.stdout)["problems"]
