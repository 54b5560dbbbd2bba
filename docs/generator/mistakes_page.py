"""docs/mistakes.md: mistakes that users make, what the doctor says of each, what the trainer says, and when.

`python -m docs.generator.mistakes_page` writes the tables from what the tests have recorded
(`parity_tests/cases/said`): ten mistakes of each framework, and all of them in a part that unfolds.
"""

import json
import re

from docs.generator.tables import ROOT, filled

PAGE = ROOT / "docs" / "mistakes.md"
SAID = ROOT / "parity_tests" / "cases" / "said"
# An underscore at the edge of a word: Markdown would set the word in italics.
EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
TAG = re.compile(r"<(?!br>)")  # of a chat template
HEAD = ["| mistake | written as | the doctor | the trainer | when |", "|---|---|---|---|---|"]
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


def table(framework: str, names: tuple[str, ...] = ()) -> str:
    """The mistakes of a framework with these names, or all of them."""
    rows = json.loads((SAID / f"{framework}.json").read_text())
    by_name = {row["name"]: row for row in rows}
    return "\n".join([*HEAD, *(line(**by_name[name]) for name in names or by_name)])


def line(name: str, change: str, doctor: str, trainer: str, when: str, why: str) -> str:
    """A mistake as a row in Markdown."""
    second = "the same" if trainer == doctor else trainer or why
    said = (EMPHASIS.sub(r"\\_", TAG.sub("&lt;", cell)) for cell in (doctor or "nothing", second))
    cells = name, f"`{change}`", *said, when or "never"
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"


def all_of(framework: str) -> str:
    """Every mistake of a framework, in a part of the page that unfolds."""
    number = len(json.loads((SAID / f"{framework}.json").read_text()))
    summary = f"<summary>All {number} mistakes that a test makes</summary>"
    return f'<details markdown="1">{summary}\n\n{table(framework)}\n\n</details>'


def page() -> str:
    """The text of the page, with its tables made anew."""
    tables = {f"ten of {name}": lambda name=name: table(name, FEATURED[name]) for name in FEATURED}
    return filled(PAGE, tables | {f"all of {name}": lambda name=name: all_of(name) for name in FEATURED})


if __name__ == "__main__":
    PAGE.write_text(page())
