"""The tables of docs/trl_options.md: versions of TRL, its trainer classes, and the channels.

`nox -s trl_versions -- --write` writes the table of versions. "works" in the table of trainers stands for a
gradient that a test compares, and a reason is the text of the error.
"""

import sys
from pathlib import Path
from xml.etree import ElementTree

from docs.generator.markdown import table
from docs.generator.written import part

# What a column claims, and the tests that prove it, by the beginning of their names.
CLAIMS = {
    "default config: TRL's parameters bit for bit after 3 steps": ("test_without_channels_every_parameter",),
    "`policy` = TRL's `loss_type`, gradients": ("test_grpo_through_our_kernel_equals_trl",),
    "hint and replay = a loop over unpadded rows": (
        "test_hint_loss_and_gradient_equal",
        "test_replay_loss_and_gradient_equal",
    ),
    "gradient accumulation 1 = 4": ("test_the_gradient_does_not_depend_on_gradient_accumulation",),
    "resume": ("test_the_ema_teacher_is_saved_and_resumed",),
    "environments and tools": ("test_the_tokens_of_the_turn", "test_feedback_"),
}


def _row(report: Path) -> tuple[str, ...]:
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


def versions(*reports: str) -> str:
    """What the tests found on each version of TRL. A report of pytest is called <version>.xml."""
    return table(("TRL", *CLAIMS), [_row(Path(one)) for one in reports])


def composition() -> str:
    """Which trainer classes work with which channels."""
    from parity_tests.cases.trl_trainers import CHANNELS, ROWS, refusal

    body = []
    for row in ROWS:
        cells = [
            f"refused: {refusal(row, channel).problem}" if channel in row.refused else "works"
            for channel in CHANNELS
        ]
        body.append((row.title, *cells))
    return table(("trainer", *CHANNELS), body)


if __name__ == "__main__":
    part("docs/trl_options.md", "versions")._replace(given=tuple(sys.argv[1:])).write()
