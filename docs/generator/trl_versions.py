"""A table of docs/trl_support.md: what the tests found on each version of TRL.

`nox -s trl_versions -- --write` runs them and writes the table.

Its arguments are reports of pytest, <version>.xml. A row is made of a report alone.
"""

import sys
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from docs.generator.tables import ROOT, filled
from docs.generator.trl_options import table

PAGE = ROOT / "docs" / "trl_support.md"
NAME = "versions"  # of the table

# What a column claims, and the tests that prove it, by the beginning of their names.
CLAIMS = {
    "default config: TRL's parameters bit for bit after 3 steps": ("test_without_channels_every_parameter",),
    "`policy` = TRL's `loss_type`, gradients": ("test_grpo_through_our_kernel_equals_trl",),
    "hint and replay = a loop over unpadded rows": (
        "test_hint_loss_and_gradient_equal",
        "test_replay_loss_and_gradient_equal",
    ),
    "gradient accumulation 1 = 4": ("test_the_gradient_does_not_depend_on_gradient_accumulation",),
    "resume": ("test_the_ema_teacher_survives", "test_the_ema_teacher_is_saved_and_resumed"),
    "environments and tools": ("test_the_tokens_of_the_turn", "test_feedback_"),
}


def row(report: Path) -> tuple[str, ...]:
    """The version and, for each claim, "yes", and the reason for what was skipped."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        str(one.get("name"))
        for one in cases
        if one.find("failure") is not None or one.find("error") is not None
    ]
    assert cases and not failed, f"{report}: {failed or 'no test ran'}"
    return (report.stem, *(_cell(cases, names) for names in CLAIMS.values()))


def _cell(cases: list[ElementTree.Element], names: tuple[str, ...]) -> str:
    concerned = [one for one in cases if str(one.get("name")).startswith(names)]
    skipped = [found for one in concerned if (found := one.find("skipped")) is not None]
    assert len(skipped) < len(concerned), f"no test ran for {names}"
    reasons = dict.fromkeys(str(one.get("message")) for one in skipped)
    return "; ".join(["yes", *(f"not tested: {reason}" for reason in reasons)])


def versions_table(reports: list[Path]) -> str:
    """The table of the page."""
    return table(("TRL", *CLAIMS), *map(row, reports))


def versions() -> list[str]:
    """The versions in the table of the page."""
    rows = PAGE.read_text().partition(f"<!-- table: {NAME} -->")[2].partition("<!-- end")[0].splitlines()[3:]
    return [one.split("|")[1].strip() for one in rows]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE, {NAME: partial(versions_table, list(map(Path, sys.argv[1:])))}))
