"""What of the product a training process loads with an adapter, in lines."""

import json
from pathlib import Path

from parity_tests.rigs.programs import python

# What a training process never loads, beside the tables of other frameworks.
NEVER = (".doctor", ".migration", ".cli", ".objective.resolve")
PROGRAM = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
ours = {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "composer_plugins"}
print(json.dumps({name: one.__file__ for name, one in ours.items() if one.__file__}))
"""


def check_loaded(module: str, table: str, most: int) -> None:
    """A fresh interpreter loads at most so many lines of ours with a module, and one framework's table."""
    done = python("-c", PROGRAM, f"composer_plugins.{module}")
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    lines = {name: len(Path(file).read_text().splitlines()) for name, file in files.items()}
    frameworks = "composer_plugins.frameworks."
    known = {f"{frameworks}{name}" for name in ("contract", "clips", table)}
    other = {name for name in lines if name.startswith(frameworks) or any(map(name.__contains__, NEVER))}
    assert other <= known, f"it loads {sorted(other - known)}"
    assert sum(lines.values()) <= most, "\n".join(f"{n:6} {name}" for name, n in sorted(lines.items()))
