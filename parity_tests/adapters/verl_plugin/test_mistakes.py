"""Each mistake of docs/mistakes.md in verl is made: it is not silent, and the page has what is said."""

import pytest

from composer_plugins.recipes.verl import on_a_cpu as verl_cpu
from docs.generator.mistakes_page import assert_told

if verl_cpu.missing():
    pytest.skip(f"composer_sync needs more: {verl_cpu.missing()}", allow_module_level=True)

from parity_tests.cases import verl as cases

# torchdata's loader calls it, and torch 2.13 warns.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_a_mistake_is_said_as_the_page_has_it(case: cases.Case) -> None:
    assert_told(cases.row(case), cases.NAME)


def test_there_are_forty() -> None:
    assert len(cases.CASES) >= 40
