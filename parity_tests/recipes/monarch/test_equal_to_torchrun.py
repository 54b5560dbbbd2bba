"""Under Monarch and under torchrun, two ranks and one seed give the same losses and the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests.rigs.paths import ROOT

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MONARCH = ["composer_plugins.recipes.monarch"]
TIMEOUT = 540.0
STEPS = 3


def output(launcher: list[str], *arguments: str, folder: Path) -> str:
    """What a script prints that this launcher runs on two ranks."""
    command = [sys.executable, "-m", *launcher, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_trl_recipe_has_the_losses_and_the_weights_of_torchrun(tmp_path: Path) -> None:
    found = []
    for launcher in (TORCHRUN, MONARCH):
        out = tmp_path / launcher[0]
        options = {"config": ROOT / "recipes/trl/three_channels.yaml", "output_dir": out, "max_steps": STEPS}
        options |= {"logging_steps": 1, "per_device_train_batch_size": 8}
        options |= {"save_strategy": "steps", "save_steps": STEPS, "use_cpu": True}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        printed = output(launcher, f"{ROOT}/recipes/trl/train.py", *arguments, folder=tmp_path)
        assert printed.count("the model is in") == 1  # on one rank of the two
        state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        losses = [[log["loss"], log["composer/hint/loss"], log["grad_norm"]] for log in state["log_history"]]
        found.append((losses, (out / "model.safetensors").read_bytes()))
    assert len(found[0][0]) == STEPS and found[0] == found[1]


@pytest.mark.slow
def test_the_script_like_prime_rl_has_the_losses_and_the_weights_of_torchrun(tmp_path: Path) -> None:
    line = f"{ROOT}/recipes/monarch/prime_rl_like.py", "--steps", str(STEPS)
    printed = [output(launcher, *line, folder=tmp_path) for launcher in (TORCHRUN, MONARCH)]
    of_both = [
        [line for line in one.splitlines() if line.startswith(("losses", "weights"))] for one in printed
    ]
    assert of_both[0] == of_both[1]
    losses, weights = (line.split()[1:] for line in of_both[0])
    assert len(losses) == STEPS and len(weights) == 2 and weights[0] == weights[1]
