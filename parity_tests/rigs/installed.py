"""The wheel of this checkout, and a program that runs with its files alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from parity_tests.rigs.paths import ROOT

# The checkout's tests are not importable, and the package is the wheel's.
PROGRAM = """
import sys
from importlib.util import find_spec
from pathlib import Path
import composer_plugins
assert find_spec("parity_tests") is None
assert Path(composer_plugins.__file__).is_relative_to(sys.argv[1]), composer_plugins.__file__
from composer_plugins.cli import main
sys.argv[1:2] = []
main()
"""


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


def unpacked(folder: Path) -> Path:
    """The files of the wheel, in a new folder."""
    zipfile.ZipFile(built(folder)).extractall(folder / "site")
    return folder / "site"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`composer-plugins` with these files and outside of the checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site), *words],
        cwd=site.parent,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
