"""The section of docs/findings.md about verl is what `check --as verl` finds in the one that is installed."""

from docs.generator.written import part


def test_the_page_is_what_a_new_run_finds() -> None:
    part("docs/findings.md", "verl").check()
