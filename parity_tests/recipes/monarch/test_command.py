"""A script under Monarch runs as under torchrun; a failure is an error, and no process is left."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from parity_tests.rigs.paths import ROOT

MARK = "COMPOSER_MONARCH_RUN"  # in the environment of every process of a run
COMMAND = [sys.executable, "-m", "composer_plugins.recipes.monarch"]
TIMEOUT = 540.0
STEPS = 3
ENDING = 20.0  # seconds for processes that were told to end

ENVIRONMENT = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
assert 0 < int(os.environ["MASTER_PORT"]) < 2**16
print(json.dumps([__name__, sys.argv[1:], *map(os.environ.get, names)]) + "\\n", end="", flush=True)
"""


def ran(*arguments: str, folder: Path, launcher: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    """Run a script under a launcher to its end; no process of it is left."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark}
    command = [*launcher, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    end = time.monotonic() + ENDING
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
    return done


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            if f"{MARK}={mark}\0" in folder.joinpath("environ").read_text(errors="replace"):
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_runs_on_every_rank_as_under_torchrun(as_module: bool, tmp_path: Path) -> None:
    tmp_path.joinpath("a_script.py").write_text(ENVIRONMENT)
    script = ["-m", "a_script"] if as_module else ["a_script.py"]
    done = ran(*script, "--lr", "-m", "x y", folder=tmp_path)
    expected = '["__main__", ["--lr", "-m", "x y"], "{0}", "{0}", "2", "2", "127.0.0.1", "1"]'
    assert done.returncode == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("["))
    assert ranks == [expected.format(0), expected.format(1)]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('deliberate')\ntime.sleep(600)"
    tmp_path.joinpath("fails.py").write_text(script)
    done = ran("fails.py", folder=tmp_path)
    assert done.returncode == 1 and "ValueError: deliberate" in done.stderr, done.stderr


@pytest.mark.slow
def test_the_trl_recipe_has_the_losses_and_the_weights_of_torchrun(tmp_path: Path) -> None:
    """Two ranks and one seed, equal bit for bit."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for name, launcher in (("torchrun", torchrun), ("monarch", COMMAND)):
        out = tmp_path / name
        options = {"config": ROOT / "recipes/trl/three_channels.yaml", "output_dir": out, "max_steps": STEPS}
        options |= {"logging_steps": 1, "per_device_train_batch_size": 8}
        options |= {"save_strategy": "steps", "save_steps": STEPS, "use_cpu": True}
        arguments = [part for key, value in options.items() for part in (f"--{key}", str(value))]
        done = ran(f"{ROOT}/recipes/trl/train.py", *arguments, folder=tmp_path, launcher=launcher)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("the model is in") == 1  # on one rank of the two
        state = json.loads((out / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
        losses = [[log["loss"], log["composer/hint/loss"], log["grad_norm"]] for log in state["log_history"]]
        found.append((losses, (out / "model.safetensors").read_bytes()))
    assert len(found[0][0]) == STEPS and found[0] == found[1]
