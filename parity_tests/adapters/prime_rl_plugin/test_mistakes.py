"""Each recorded mistake is made: it is not silent, and the keys of what is said are the recorded ones."""

import pytest

from parity_tests.cases import prime_rl as cases
from parity_tests.cases.recorded import assert_told, recorded


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_is_said_of_a_mistake_is_what_was_recorded(case: cases.Case) -> None:
    assert_told(cases.row(case), "prime_rl")


def test_each_mistake_is_recorded_once() -> None:
    assert [case.name for case in cases.CASES] == [*recorded("prime_rl")]
