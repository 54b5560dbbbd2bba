"""Each mistake of docs/mistakes.md in TRL is made: it is not silent, and what is said was recorded."""

import pytest

from parity_tests.cases import trl as cases
from parity_tests.cases.recorded import assert_told


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_is_said_of_a_mistake_is_what_was_recorded(case: cases.Case) -> None:
    assert_told(cases.row(case), "trl")
