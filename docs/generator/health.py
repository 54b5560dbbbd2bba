"""docs/health.md: the rules by which a run is warned, from the table of them."""

import re
from importlib import import_module

from composer_plugins.health.rules import RULES
from docs.generator.markdown import table

WINDOWS = {
    "equal": "at equal weights",
    "whole": "at equal weights, since the start",
    "later": "after the policy has moved",
    "always": "always",
    "first": "the first window",
    "rollouts": "the rollouts of a step",
    "weights": "an update",
    "pairs": "16 steps",
}


def rules() -> str:
    """Each rule: its metric, when it is looked at, what it says, and what to do."""
    body = [
        (
            f"`{rule.metric}`",
            WINDOWS[rule.when] + (f", {rule.windows} times in a row" if rule.windows > 1 else ""),
            re.sub(r"{[^}]*}( %)?", "N", rule.problem),
            rule.remedy,
        )
        for rule in RULES
    ]
    return table(("metric", "window", "what it says", "what to do"), body)


def seen(framework: str) -> str:
    """The faults of real runs, with their first numbers and messages. Its program writes it row by row."""
    from benchmarks.health import COLUMNS, described

    rows = [described(case)[1] for case in import_module(f"benchmarks.health_{framework.lower()}").faults()]
    return table(COLUMNS, []) + "\n".join(rows)
