"""`explain`, `diff`, `plot` and `check` take the same names, and mean the same losses by them."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_plugins import plotting
from composer_plugins.testing.checking import find_row
from composer_plugins.testing.settings import settings
from parity_tests.rigs.commands import error, invoke, output
from parity_tests.rigs.paths import ROOT

LAW = "more_padding_changes_nothing"
LOSSES = '''
from composer_plugins.kernels.types import TokenLoss


def my_loss(logprobs, advantages, mask):
    """A loss of mine."""
    return TokenLoss((-logprobs * advantages).where(mask, 0.0), {})
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    (tmp_path / "my_losses.py").write_text(LOSSES)
    return tmp_path


@pytest.mark.parametrize("name", ["cispo", "cispo@trl", "my_losses:my_loss", "my_losses.py:my_loss"])
def test_every_command_takes_every_form_of_a_name(folder: Path, name: str) -> None:
    (explained,) = json.loads(output("explain", name, "--json"))["losses"]
    assert explained["example"]["results"] and explained["kind"] == "policy"
    assert output("diff", name, "reinforce", "--kind", "policy").startswith(f"{name} and reinforce  (policy)")
    assert name in {
        series.label for panel in plotting.picture([name, "ppo"]).panels for series in panel.series
    }
    assert output("check", name, "--only", LAW).endswith("(policy): 1 passed, 0 failed, 0 not applicable\n")


def test_a_name_of_several_kinds_means_the_policy_loss_and_a_line_says_so(caplog: Any) -> None:
    line = "grpo: taken as a policy loss; set kind (--kind) to advantage for the other"
    assert output("check", "grpo", "--only", LAW).startswith("grpo (policy)") and caplog.messages == [line]
    assert plotting.picture("grpo").title == "grpo: a policy loss" and caplog.messages == [line, line]
    assert find_row("ipo").kind == "policy" and find_row("ipo", "preference").kind == "preference"
    assert len(caplog.messages) == 3


def test_a_dialect_is_checked_alone() -> None:
    labels = [one.label for one in settings(find_row("cispo@trl")) if "@" in one.label]
    assert labels == ["cispo@trl"]
    row = find_row("sdpo@trl")
    assert not any(key.endswith("@sdpo") for key in row.exceptions)


def test_the_name_of_a_file_here_is_an_error_that_names_its_function(folder: Path) -> None:
    for name in ("my_losses", "my_losses.py"):
        expected = f"unknown loss {name!r}, and my_losses.py is a file here; name a function of it: "
        expected += "my_losses.py:FUNCTION in a command, and my_losses:FUNCTION in a config"
        assert error("check", name) == f"loss: {expected}"
        assert error("explain", name) == f"NAME: {expected}"
        assert error("diff", "cispo", name) == f"SECOND: {expected}"
        assert error("plot", name, "--out", "p.png") == f"NAME: {expected}"
    assert "did you mean 'my_loss'?" in error("explain", "my_losses.py:my_los")


def test_check_says_on_a_terminal_what_it_does_and_nothing_in_a_pipe() -> None:
    words = [sys.executable, "-m", "composer_plugins", "check", "cispo", "--only", LAW]
    ours, theirs = pty.openpty()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=theirs, cwd=ROOT) as run:
        os.close(theirs)
        shown = b""
        while b"law 1 of 1" not in shown:
            shown += os.read(ours, 4096)
        assert b"cispo: loading torch" in shown
        assert run.communicate()[0].startswith(b"cispo (policy): 1 passed")
    os.close(ours)
    assert invoke("check", "cispo", "--only", LAW).stderr == ""
