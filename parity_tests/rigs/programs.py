"""Programs in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

from parity_tests.rigs.paths import ROOT


def python(
    *words: str, first: Path = ROOT, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What Python with these words prints. The folder `first` stands before this repository on its path."""
    own = environment | {"PYTHONPATH": f"{first}{os.pathsep}{ROOT}"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=os.environ | own, cwd=cwd, capture_output=True, text=True)
