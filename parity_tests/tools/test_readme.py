"""The README is short, and shows what the commands print."""

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from composer_plugins.cli import app
from composer_plugins.frameworks.registry import running
from composer_plugins.losses.registry import losses
from parity_tests.rigs.paths import ROOT

README = (ROOT / "README.md").read_text()
MAIN_COMMAND, CHECK = "composer-plugins ", "composer-plugins check my_losses:reinforce_kl"
MOST_LINES = 120


def blocks() -> dict[str, list[str]]:
    """By command, the lines that the README shows of what it prints."""
    found = re.findall(r"^```\n\$ (.*?)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return {command: [line.rstrip() for line in text.splitlines() if line.strip()] for command, text in found}


def test_the_readme_is_short_and_every_page_it_names_exists() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    for link in re.findall(r"\]\((?!https:)([^)#]+)", README):
        assert (ROOT / link).exists(), link


def test_the_commands_print_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"```python\n(# my_losses.py\n.*?)```", README, re.DOTALL)
    assert program.split("reinforce_kl.mode")[0] in (ROOT / "docs/writing_a_loss.md").read_text()
    (tmp_path / "my_losses.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)  # of other tests
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    shown = blocks()
    assert len(shown) == 2 and CHECK in shown
    for command, lines in shown.items():
        done = CliRunner().invoke(app, command.removeprefix(MAIN_COMMAND).split())
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        assert [line for line in printed if line in lines] == lines, done.stdout


def test_the_number_of_policy_losses_and_laws() -> None:
    policies = sum(loss.kind == "policy" for loss in losses())
    runs = sum(loss.kind == "policy" and any(one.runs(loss) for one in running()) for loss in losses())
    assert f"one of {policies} published policy losses ({policies - runs} of them as kernels alone" in README
