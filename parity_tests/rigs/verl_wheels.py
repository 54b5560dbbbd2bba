"""The wheels of older verls, and a process on each: `verl_probe.py` is the program that runs there."""

import json
import os
from importlib.metadata import version as installed
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python

PLUGIN = "composer_plugins.adapters.verl_plugin.register"
TARGET = "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig"
INSTALLED = installed("verl")
FOLDERS = "VERL_WHEELS"  # a folder with one wheel unpacked in <version>/ each


def wheel(version: str) -> Path | None:
    """Where a version lies unpacked, None for the installed one; the test is skipped where it is nowhere."""
    found = None if version == INSTALLED else Path(os.environ.get(FOLDERS) or "none", version)
    if found and not (found / "verl").is_dir():
        pytest.skip(f"no verl {version} in a folder that {FOLDERS} names (nox -s verl makes it)")
    return found


def start(code: list[str], wheel: Path | None, **env: str) -> CompletedProcess[str]:
    """Python on the wheel, or on the installed verl, that loads our plugin with `import verl`."""
    return python(*code, first=wheel or ROOT, **{"VERL_USE_EXTERNAL_MODULES": PLUGIN, **env})


def probe(wheel: Path | None, out: Path) -> dict[str, Any]:
    """What the program found with this wheel."""
    done = start(["-m", "parity_tests.rigs.verl_probe", str(out)], wheel)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found
