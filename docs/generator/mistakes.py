"""docs/mistakes.md: mistakes that users make, what the doctor says of each, what the trainer says, and when.

Its tables are made of what the tests have recorded in `parity_tests/cases/said`.
"""

import json
import re

from docs.generator.markdown import table
from docs.generator.written import ROOT

SAID = ROOT / "parity_tests" / "cases" / "said"
# An underscore at the edge of a word: Markdown would set the word in italics.
EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
TAG = re.compile(r"<(?!br>)")  # of a chat template
HEAD = ("mistake", "written as", "the doctor", "the trainer", "when")
TITLES = {"trl": "TRL", "verl": "verl", "prime_rl": "PRIME-RL"}
FEATURED = {
    "trl": (
        "a misspelt option",
        "verl's name of TRL's KL coefficient",
        "a clip of 28 for 28 percent",
        "TRL's default cap of cispo",
        "TRL's clip beside a loss without one",
        "an option of the hint without its weight",
        "a decay as the EMA rate",
        "unused columns removed",
        "sides that repeat the prompt",
        "a reward that is NaN",
    ),
    "verl": (
        "an unknown loss",
        "one rollout of each prompt",
        "verl's clip beside a loss without one",
        "verl's clip of PPO beside a ratio of the sequence",
        "an unknown reduction",
        "a policy that the workers do not see",
        "an advantage that is not the paper's",
        "a hint in another trainer",
        "DPPO around the trainer's policy",
        "a data set without hints",
    ),
    "prime_rl": (
        "a misspelt loss",
        "PRIME-RL's name of a parameter",
        "PPO without an old policy",
        "a loss that is reduced in another way",
        "a colon in the import path",
        "a pair on the newest, whose divisor cancels it",
        "equal rewards are dropped, and with them the hint",
        "nothing stamps a hint",
        "groups of one completion",
        "probabilities in place of log-probabilities",
    ),
}


def ten_of(framework: str) -> str:
    """The featured mistakes of a framework."""
    by_name = {row["name"]: row for row in _recorded(framework)}
    return table(HEAD, [_cells(**by_name[name]) for name in FEATURED[framework]])


def all_of(framework: str) -> str:
    """Every mistake of a framework, in a part of the page that unfolds.

    The search of the site leads to the heading in it, and the theme then unfolds it.
    """
    rows = [_cells(**row) for row in _recorded(framework)]
    summary = f"<summary>All {len(rows)} mistakes that a test makes</summary>"
    heading = f"### All mistakes: {TITLES[framework]}"
    return f'<details markdown="1">{summary}\n\n{heading}\n\n{table(HEAD, rows)}\n</details>'


def _recorded(framework: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((SAID / f"{framework}.json").read_text())
    return found


def _cells(name: str, change: str, doctor: str, trainer: str, when: str, why: str) -> tuple[str, ...]:
    second = "the same" if trainer == doctor else trainer or why
    said = (EMPHASIS.sub(r"\\_", TAG.sub("&lt;", cell)) for cell in (doctor or "nothing", second))
    return name, f"`{change}`", *said, when or "never"
