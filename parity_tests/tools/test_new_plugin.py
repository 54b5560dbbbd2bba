"""`composer-plugins new-plugin`: what it makes is installed as a wheel, and its own tests pass."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs import installed
from parity_tests.rigs.commands import invoke

pytestmark = pytest.mark.thorough


def make(*args: str) -> Any:
    return invoke("new-plugin", *args)


def run(*command: object, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(one) for one in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


def test_every_name_is_replaced(tmp_path: Path) -> None:
    assert make("Tiny-Steps", "--folder", str(tmp_path / "new")).exit_code == 0
    made = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    wanted = {"pyproject.toml", "README.md", "kernels.py", "plugin.py", "test_tiny_steps.py"}
    assert wanted <= {path.name for path in made}
    assert not [path for path in made if "my_losses" in path.read_text() or "my-losses" in path.read_text()]
    project = (tmp_path / "new" / "pyproject.toml").read_text()
    assert 'name = "Tiny-Steps"' in project and 'tiny_steps = "tiny_steps.plugin"' in project


NOT_A_NAME = ("1st", "a b", "../x", "-x", "x-", "lösung", "a/b", "class")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, f"{name!r} is not the name of a distribution") for name in NOT_A_NAME),
        ("json", "a module json exists already; choose another name"),
        ("Composer-Plugins", "a module composer_plugins exists already"),
        ("prime-rl", "a module prime_rl exists already"),
        ("torch", "a module torch exists already"),
    ],
)
def test_a_name_that_cannot_be_used_is_an_error(name: str, reason: str, tmp_path: Path) -> None:
    found = make("--folder", str(tmp_path / "new"), "--", name)
    assert str(found.exception).startswith(f"name: {reason}") and not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    assert "exists already" in str(make("kept-losses", "--folder", str(tmp_path)).exception)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_a_wheel_of_it_passes_its_own_tests_in_a_new_environment(tmp_path: Path) -> None:
    """The environment holds our wheel and the new one; torch and pytest come from this environment."""
    installed.built(tmp_path)
    made = tmp_path / "tiny-steps"
    assert make("tiny-steps", "--folder", str(made)).exit_code == 0
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, made, cwd=tmp_path)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    wheels = sorted(tmp_path.glob("*.whl"))
    assert len(wheels) == 2
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", *wheels, cwd=tmp_path)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    where = run(python, "-c", "import composer_plugins; print(composer_plugins.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    moved = tmp_path / "tests"
    (made / "tests").rename(moved)  # beside no source: the wheel's own code is tested
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", moved, cwd=tmp_path)
    assert " passed" in out and "failed" not in out
    listed = run(python, "-m", "composer_plugins", "list", "--kind", "policy", cwd=tmp_path)
    assert "half_negative" in listed
