"""Each mistake of docs/mistakes.md in PRIME-RL is made: it is not silent, and the page has what is said."""

import pytest

from docs.generator.mistakes_page import assert_told
from parity_tests.cases import prime_rl as cases


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_a_mistake_is_said_as_the_page_has_it(case: cases.Case) -> None:
    assert_told(cases.row(case), cases.NAME)


def test_there_are_forty() -> None:
    assert len(cases.CASES) >= 40
