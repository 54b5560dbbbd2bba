"""The wheel of this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

from parity_tests.rigs.paths import ROOT


def built(folder: Path) -> Path:
    """Build the wheel from this checkout by way of its sdist, as a release is.

    From a copy: setuptools writes into the folder that it builds, and other tests build at the same time.
    """
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.pyi")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=skipped)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    build = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    return wheel
