"""DDP, FSDP2 and DeepSpeed on two processes give the gradients of one process, and so does a resumed run."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.adapters.trl_mixin import before_training
from composer_plugins.errors import ConfigError
from parity_tests.rigs import sharded, tiny
from parity_tests.rigs.paths import ROOT

LIMIT = 600  # seconds: processes that wait for each other would never end
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port

Results = dict[str, dict[str, Any]]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a command says; it and every process that it started are ended at the time limit."""
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=settings, cwd=folder, start_new_session=True, **pipes)
    try:
        said: str = process.communicate(timeout=LIMIT)[0]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-6000:]
    return said


def launched(engine: str, job: str, folder: Path) -> Results:
    """The results of a job of `sharded` on two processes."""
    run([sys.executable, *TORCHRUN, "-m", "parity_tests.rigs.sharded", engine, job, str(folder)], folder)
    found: Results = torch.load(folder / f"{engine} {job}.pt")
    assert found.pop("ranks") == 2
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that the cases load from their path."""
    made = tmp_path_factory.mktemp("sharded")
    tiny.model().save_pretrained(made / "model")
    return made


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Results:
    """The results of every case in this process."""
    return sharded.results(sharded.ONE, "cases", 1, folder)


def assert_equal(expected: Results, found: Results, last: int | None = None) -> None:
    """Compare gradients: of all steps, or those of the `last` steps.

    The weights of a step have the roundings of the steps before it, so the n-th step has n times as many.
    """
    wrong = {}
    for name in found:
        mine, theirs = expected[name]["gradients"], found[name]["gradients"]
        first = 1 if last is None else len(mine) - last + 1
        for step, (a, b) in enumerate(zip(mine[first - 1 :], theirs, strict=True), first):
            difference = tiny.relative_difference(a, b)
            if difference > step * tiny.FLOAT32:
                wrong[f"{name}, step {step}"] = difference
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("engine", [name for name in sharded.ENGINES if name != sharded.ONE])
def test_an_engine_gives_the_gradients_of_one_process_and_resumes(
    engine: str, one_process: Results, folder: Path
) -> None:
    """One launch for all cases, and one that resumes two of them from their checkpoints."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    cases = launched(engine, "cases", folder)
    assert_equal(one_process, cases)
    expected, found = (results["all, evaluated"]["evaluation"] for results in (one_process, cases))
    assert len(expected) > 8 and found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    if engine not in sharded.WHOLE:
        assert_equal(one_process, launched(engine, "resume", folder), last=1)


@pytest.mark.slow
def test_the_cases_tell_the_teachers_apart(one_process: Results) -> None:
    """Otherwise an ema teacher that never moves, or one that is the policy, would pass."""
    last = {kind: one_process[f"hint, {kind}"]["gradients"][-1] for kind in ("base", "ema", "live")}
    for one, other in combinations(last, 2):
        assert tiny.relative_difference(last[one], last[other]) > 1e-4, f"{one} and {other}"
    without, everything = (one_process[name]["gradients"][0] for name in ("TRL's own", "all, evaluated"))
    assert tiny.relative_difference(without, everything) > 1e-2


README = (ROOT / "recipes/trl/README.md").read_text()
COMMANDS = re.findall(r"^accelerate launch --config_file .*$", README, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(shlex.split(command)[3]).stem)
def test_the_readmes_commands_start_two_processes_with_equal_losses(command: str, tmp_path: Path) -> None:
    """As printed, in a copy of the checkout's layout; FSDP2 would be DDP on a CPU without `on_a_cpu`."""
    if "zero" in command:
        pytest.importorskip("deepspeed")
    site = "from parity_tests.rigs import on_a_cpu; on_a_cpu.of_this_launch()"
    (tmp_path / "sitecustomize.py").write_text(site)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    program = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(command)[2:]]
    said = run(program, tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert said.count("composer loss = ") == 1
    engine = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}.get(Path(shlex.split(command)[3]).stem, "DEEPSPEED")
    assert f"; processes: 2 ({engine})" in said
    assert ("from logits" in said) == ("fsdp2" in command or "zero3" in command)
    (loss,) = map(float, re.findall(r"'loss': '([0-9.]+)'", said))
    assert loss == pytest.approx(1.666, abs=2e-3)  # of every engine


def test_the_readme_has_a_command_for_every_engine() -> None:
    used = {Path(shlex.split(command)[3]).name for command in COMMANDS}
    assert used == {path.name for path in (ROOT / "recipes/trl/engines").iterdir()}


def test_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny.trainer(hint_weight=1.0)
    monkeypatch.setattr(made, "is_fsdp_enabled", True)
    with pytest.raises(ConfigError, match="fsdp_version: it is 1"):
        before_training.check_frozen(made)
