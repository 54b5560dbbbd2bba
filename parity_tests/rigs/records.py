"""What was last run of the sessions that CI cannot run, and on which of our files.

`parity_tests/checkouts.json` has, for each session of nox, the commits that it ran on, the numbers of its
tests, and a hash of the files that it covers. `python -m parity_tests.checkouts` writes it.
"""

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from parity_tests.rigs.paths import ROOT, TESTS

RECORD = TESTS / "checkouts.json"


class Session(NamedTuple):
    """A session of nox that CI does not run."""

    title: str
    covers: tuple[str, ...]  # files and folders, from the root
    variable: str = ""  # of `make checkouts`: the folder of a checkout; "" where it needs none
    remote: str = ""  # the repository, as GitHub names it


def _of_framework(title: str, name: str, variable: str, remote: str, adapter: str = "") -> Session:
    adapter = adapter or f"{name}_loss"
    covers = (
        f"adapters/{adapter}",
        f"composer_plugins/conformance/{name}_claims",
        f"composer_plugins/frameworks/{name}.py",
        f"parity_tests/adapters/{adapter}",
    )
    return Session(title, covers, variable, remote)


CHECKOUTS = {
    "prime_rl": _of_framework(
        "PRIME-RL", "prime_rl", "PRIME_RL", "PrimeIntellect-ai/prime-rl", "prime_rl_plugin"
    ),
    "nemo_rl": _of_framework("NeMo-RL", "nemo_rl", "NEMO_RL", "NVIDIA-NeMo/RL"),
    "slime": _of_framework("slime", "slime", "SLIME", "THUDM/slime"),
    "skyrl": _of_framework("SkyRL's main branch", "skyrl", "SKYRL", "NovaSky-AI/SkyRL"),
}
# These need hours, or packages of several gigabytes.
LONG = {
    "axolotl": Session("Axolotl", ("recipes/axolotl", "parity_tests/recipes/axolotl")),
    "planted_bugs": Session("planted bugs", ("parity_tests/planted_bugs.json",)),
}
SESSIONS = CHECKOUTS | LONG


def digest(covers: tuple[str, ...], root: Path = ROOT) -> str:
    """A hash of the names and the texts of these files, and of the Python files in these folders."""
    found = hashlib.sha256()
    for path in _files(covers, root):
        found.update(path.relative_to(root).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _files(covers: tuple[str, ...], root: Path) -> Iterator[Path]:
    for name in covers:
        path = root / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def records() -> dict[str, dict[str, Any]]:
    """The record of each session that has one."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return found


def write(name: str, files: str, *runs: Mapping[str, Any]) -> None:
    """Record the runs of a session on the files with this hash."""
    today = datetime.date.today().isoformat()
    found = records() | {name: {"files": files, "runs": [{"date": today, **run} for run in runs]}}
    RECORD.write_text(json.dumps({one: found[one] for one in SESSIONS if one in found}, indent=1) + "\n")


def stale(recorded: Mapping[str, Mapping[str, Any]], root: Path = ROOT) -> list[str]:
    """The sessions on a checkout whose files are others than those that they ran on last."""
    return [
        name
        for name, session in CHECKOUTS.items()
        if recorded.get(name, {}).get("files") != digest(session.covers, root)
    ]


def command(names: list[str]) -> str:
    """The command that runs these sessions and records them."""
    return f"make checkouts {' '.join(f'{CHECKOUTS[name].variable}=DIR' for name in names)}"
