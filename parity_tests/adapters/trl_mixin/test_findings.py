"""The section of docs/findings.md about TRL is what `check --as trl` finds in the one that is installed."""

import pytest

from docs.generator.written import part


@pytest.mark.slow
def test_the_page_is_what_a_new_run_finds() -> None:
    part("docs/findings.md", "trl").check()
