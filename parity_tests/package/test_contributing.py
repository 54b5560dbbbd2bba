"""The example of CONTRIBUTING.md, applied to a copy of the repository, is green and changes what it says."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parity_tests.rigs.paths import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
LEFT_OUT = shutil.ignore_patterns(".*", "build", "demo_out", "site", "*.egg-info", "__pycache__")
STEP = re.compile(r"^\*\*\d\. [^*]+\*\*[^\n]*?`([\w/]+\.py)`.*?^```(?:python)?\n(.*?)^```$", re.S | re.M)
GENERATED = {"docs/trl_options.md", "docs/verl.md", "composer_plugins/cli/recorded.json"}


def example() -> dict[str, str]:
    """The code of the example's steps, by the file that each of them names."""
    section = PAGE.split("## Add a variant of a loss")[1].split("\n## ")[0]
    return dict(STEP.findall(section))


def applied(copy: Path) -> None:
    """Do what the steps say."""
    for name, code in example().items():
        file = copy / name
        before = file.read_text() if file.exists() else ""
        if "LOSSES" in before:  # a row
            after = before.replace("LOSSES = (\n", f"LOSSES = (\n{code}", 1)
        elif "__all__" in before:  # a function, and its name
            function = re.findall(r"^def (\w+)", code, re.MULTILINE)[0]
            after = before.replace("__all__ = [", f'__all__ = ["{function}", ', 1) + f"\n\n{code}"
        else:
            after = code
        assert after != before, f"{name} has no place for the step"
        file.write_text(after)


def state(folder: Path) -> dict[str, str]:
    """A hash of each file, the caches left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    kept = {path.relative_to(folder).as_posix(): path for path in files if not path.is_symlink()}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in kept.items()
        if not name.startswith(".") and ".egg-info" not in name
    }


def test_the_example_names_its_files() -> None:
    assert len(example()) == 3 and all(f"`{file}`" in PAGE for file in GENERATED)


@pytest.mark.slow
def test_the_example_passes_the_first_tier_and_changes_the_files_that_it_names(tmp_path: Path) -> None:
    copy = tmp_path / "composer-plugins"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    before = state(copy)
    applied(copy)
    for module, *words in (("docs.generator",), ("pytest", "-q", "-p", "no:cacheprovider")):
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=copy,
            env={
                "PATH": "/usr/bin:/bin",
                "PYTHONPATH": str(copy),
                "OMP_NUM_THREADS": "1",
                "HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    after = state(copy)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed == {*example()} | GENERATED
