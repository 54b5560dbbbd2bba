"""Our losses with the newest release of a framework: the nightly run, `nox -s newest`.

    python -m benchmarks.newest trl trl transformers torch    # in the environment that has them: writes a row
    python -m benchmarks.newest trl trl torch -- live/trl     # the same with these tests alone
    python -m benchmarks.newest --table                       # prints the rows, and what has changed

A row says which versions were installed and whether each is the newest on the index, what
`composer-plugins conform` found, and which of the fast tests failed. `--table` compares the rows with those
recorded in newest.json. It exits with 3 if one has changed or a package is outdated. `--write` records.
"""

import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "build" / "newest"
RECORDED = Path(__file__).with_name("newest.json")
CHANGED = 3
# The fast tests of each framework, below parity_tests/.
TESTS = {
    "trl": ("adapters/trl_mixin", "live/trl"),
    "verl": ("adapters/verl_plugin", "live/verl", "--ignore=parity_tests/adapters/verl_plugin/without_verl"),
    "skyrl": ("adapters/skyrl_loss", "live/skyrl", "--ignore=parity_tests/adapters/skyrl_loss/without_skyrl"),
    "tinker": ("adapters/tinker_loss/with_sdk",),
    "torch": ("kernels", "losses", "objective"),
}
HEADINGS = ("framework", "installed", "outdated", "losses compared", "tests", "failed")


def main(arguments: Sequence[str]) -> int:
    """Write the row of one framework, or print the table of all."""
    if arguments[:1] in (["--table"], ["--write"]):
        return table(write=arguments[0] == "--write")
    given = list(arguments)
    chosen = given[given.index("--") + 1 :] if "--" in given else []
    name, *packages = given[: given.index("--")] if chosen else given
    FOUND.mkdir(parents=True, exist_ok=True)
    installed = {package: version(package) for package in packages}
    newest = {package: newest_of(package) for package in packages}
    row = {
        "installed": installed | {"Python": platform.python_version()},
        "outdated": {k: newest[k] for k in packages if installed[k].partition("+")[0] != newest[k]},
        "conform": conform(name),
        "tests": tests(name, chosen or TESTS[name]),
    }
    (FOUND / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps({name: row}, indent=1))
    return 0


def newest_of(package: str) -> str:
    """The newest release on the index, whatever is installed and whichever Python it asks for."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--ignore-requires-python", package]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"^Available versions: ([^,\s]+)", answer, re.MULTILINE)
    return str(found).partition("+")[0]


def conform(name: str) -> dict[str, list[str]]:
    """The losses of the framework by what `composer-plugins conform` says of them."""
    if name in ("tinker", "torch"):  # nothing to compare: Tinker's losses run on its servers
        return {}
    command = [sys.executable, "-m", "composer_plugins", "conform", name, "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        rows = json.loads(run.stdout)[0]["rows"]
    except (ValueError, IndexError):
        return {"could not be run": [run.stderr.strip()[-300:]]}
    return {
        status: sorted(f"{one['loss']} ({one['upstream']})" for one in rows if one["status"] == status)
        for status in sorted({one["status"] for one in rows})
    }


def tests(name: str, chosen: Sequence[str]) -> dict[str, Any]:
    """How many of these tests passed, and the names of those that failed."""
    report = FOUND / f"{name}.xml"
    report.unlink(missing_ok=True)
    folders = [one if one.startswith("--") else f"parity_tests/{one}" for one in chosen]
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *folders, *options], cwd=ROOT)
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failed": ["pytest wrote no report"]}
    counted, failed = Counter[str](), set[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {one.tag for one in case} & {"failure", "error", "skipped"}
        counted[min(tags, default="passed")] += 1
        if tags - {"skipped"}:
            failed.add(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
    return {"passed": counted["passed"], "skipped": counted["skipped"], "failed": sorted(failed)}


def outcome(row: dict[str, Any]) -> dict[str, set[str]]:
    """What of a row is news when it changes: not the number of our own tests, and not a version alone."""
    return {key: set(losses) for key, losses in row["conform"].items()} | {
        "failed": set(row["tests"]["failed"])
    }


def news(row: dict[str, Any] | None, before: dict[str, Any] | None) -> list[str]:
    """What a person should look at: which packages are outdated, and what the recorded row does not have."""
    if row is None:
        return ["it has no row: its session ended before it wrote one"]
    lines = [f"outdated: {key}, whose newest release is {value}" for key, value in row["outdated"].items()]
    if before is None:
        return [*lines, "it was not recorded before"]
    now, then = outcome(row), outcome(before)
    for key in sorted(now.keys() | then.keys()):
        came, went = now.get(key, set()) - then.get(key, set()), then.get(key, set()) - now.get(key, set())
        lines += [f"{key}: `{one}` is new" for one in sorted(came)]
        lines += [f"{key}: `{one}` is no longer there" for one in sorted(went)]
    return lines


def table(write: bool = False) -> int:
    """Print the rows as Markdown, and what is news; return 3 if anything is."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOUND.glob("*.json"))}
    if not found:
        print("there is no row: run make newest", file=sys.stderr)
        return 2
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}")
    for name, row in found.items():
        print(f"| {' | '.join(cells(name, row))} |")
    if write:
        RECORDED.write_text(json.dumps(recorded | found, indent=1) + "\n")
        return 0
    told = {
        name: news(found.get(name), recorded.get(name)) for name in sorted(found.keys() | recorded.keys())
    }
    for name, lines in told.items():
        print("".join(f"\n- {name}: {line}" for line in lines), end="")
    print()
    return CHANGED if any(told.values()) else 0


def cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    ours, counted = row["conform"], row["tests"]
    skipped = f", {counted['skipped']} skipped" if counted["skipped"] else ""
    return (
        name,
        ", ".join(f"{key} {value}" for key, value in row["installed"].items()),
        ", ".join(f"{key}: {value} is the newest" for key, value in row["outdated"].items()) or "none",
        ", ".join(f"{len(losses)} {status}" for status, losses in ours.items()) or "none",
        f"{counted['passed']} passed{skipped}",
        ", ".join(f"`{one}`" for one in counted["failed"]) or "none",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
