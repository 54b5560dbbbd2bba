"""The tables of docs/parity.md are what `composer-plugins conform --markdown` prints.

`python -m docs.generator.parity_page [--source DIR]` writes the tables of the frameworks that are
installed here, and of PRIME-RL if DIR is a checkout of it. Run it in each of the environments trl and verl.
"""

import subprocess
import sys
from functools import partial

from docs.generator.tables import ROOT, filled

PAGE = ROOT / "docs" / "parity.md"
FRAMEWORKS = ("trl", "verl", "prime-rl")
NOTHING_RAN = 2


def printed(framework: str, *words: str) -> str:
    """What the command prints for a framework; "" if it is not installed."""
    command = [sys.executable, "-m", "composer_plugins", "conform", framework, "--markdown", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, NOTHING_RAN), done.stdout + done.stderr
    return "" if done.returncode else done.stdout.strip()


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows, without the numbers, which differ in their last digits by machine."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    return [[*row[:3], *row[5:]] for row in cells]


def on_the_page(name: str) -> str:
    """The table of a framework on the page."""
    return PAGE.read_text().partition(f"<!-- table: {name} -->")[2].partition("<!-- end")[0].strip()


if __name__ == "__main__":
    words = {"prime-rl": sys.argv[1:]}  # --source
    found = {name: table for name in FRAMEWORKS if (table := printed(name, *words.get(name, ())))}
    PAGE.write_text(filled(PAGE, {name: partial(str, table) for name, table in found.items()}))
    print(f"wrote {', '.join(found) or 'nothing'}")
