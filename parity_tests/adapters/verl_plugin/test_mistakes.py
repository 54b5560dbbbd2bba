"""Each recorded mistake is made: it is not silent, and the keys of what is said are the recorded ones."""

import pytest

from parity_tests.cases import verl as cases
from parity_tests.cases.recorded import assert_told

# torchdata's loader calls it, and torch 2.13 warns.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_what_is_said_of_a_mistake_is_what_was_recorded(case: cases.Case) -> None:
    assert_told(cases.row(case), "verl")
