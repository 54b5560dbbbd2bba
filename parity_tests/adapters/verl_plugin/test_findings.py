"""The section of docs/findings.md about verl is what `check --as verl` finds in the one that is installed."""

from docs.generator import findings


def test_the_page_is_what_a_new_run_finds() -> None:
    assert findings.page("verl") == findings.PAGE.read_text()
