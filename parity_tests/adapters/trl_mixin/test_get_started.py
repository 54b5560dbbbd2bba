"""docs/get_started.md: its commands run as printed, in an empty folder, and so does its notebook."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from docs.generator.notebook import BLOCK, PROMPT, cells
from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "docs/get_started.md").read_text()
NOTEBOOK = ROOT / "docs/get_started.ipynb"
NOT_HERE = ("pip install", "composer-plugins demo")  # it is installed; the notebook runs the demo
FINDS = {"composer-plugins doctor": 1}  # the exit status of what finds a mistake


def environment() -> dict[str, str]:
    """The environment of a shell in which composer-plugins is installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def test_the_commands_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    ran = 0
    for language, text in BLOCK.findall(PAGE):
        if language != "console":
            name, _, content = text.partition("\n")
            (tmp_path / name.removeprefix("# ")).write_text(content)
            continue
        command, *shown = text.splitlines()
        assert command.startswith(PROMPT)
        if (command := command.removeprefix(PROMPT)).startswith(NOT_HERE):
            continue
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        status = next((code for start, code in FINDS.items() if command.startswith(start)), 0)
        assert done.returncode == status, command + done.stdout + done.stderr
        printed = [line.rstrip() for line in (done.stdout + done.stderr).splitlines()]
        assert [line for line in printed if line in shown] == shown, (command, printed)
        if command == "python train.py":
            rewards = [float(number) for number in re.findall(r"'reward': '([\d.]+)'", done.stdout)]
            assert len(rewards) == 6 and rewards[-1] > rewards[0]
        ran += 1
    assert ran == 6 and (tmp_path / "losses.png").stat().st_size > 10_000


def numbers(text: str) -> list[list[float]]:
    """Reward and greedy accuracy in each row of the demo's table."""
    rows = re.findall(r"^ RL.* (0\.\d+) +(0\.\d+) +\S+ +(0\.\d+) +([01]\.\d+) +\d+ s\b", text, re.MULTILINE)
    return [[float(number) for number in row] for row in rows]


@pytest.mark.slow
def test_the_notebook_runs_and_its_demo_prints_the_numbers_of_the_page(tmp_path: Path) -> None:
    """Start and end of the reward, and of the accuracy. Another processor may change the second digits."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("!pip install")]
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    outputs = ["".join(one.get("text", "") for one in cell.get("outputs", ())) for cell in notebook.cells]
    text = "\n".join(outputs)
    assert "Traceback" not in text and "Error" not in text.replace("1 error", "")
    assert "26 passed, 0 failed" in text and "wrote losses.png" in text
    promised, printed = numbers(PAGE), numbers(text)
    assert len(promised) == len(printed) == 4
    for row, expected in zip(printed, promised, strict=True):
        assert row == pytest.approx(expected, abs=0.05)
    assert (
        sum(kind == "code" for kind, _ in cells(PAGE))
        == len(outputs) - sum(cell.cell_type == "markdown" for cell in notebook.cells) + 1
    )
