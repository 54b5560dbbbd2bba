"""What programs write into the pages is what they write today, as far as no framework is needed for it."""

import re

import pytest

from docs.generator.written import END, PARTS, ROOT, Part


@pytest.mark.parametrize("part", [one for one in PARTS if not one.needs], ids=str)
def test_a_part_of_a_page_is_what_its_function_makes(part: Part) -> None:
    part.check()


def test_every_mark_in_a_page_belongs_to_a_part() -> None:
    found = set[tuple[str, str]]()
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        names = re.findall(r"^<!-- table: (.*) -->$", text, re.MULTILINE)
        assert text.count("<!--") == 2 * len(names) == 2 * text.count(END), page
        found |= {(f"docs/{page.name}", name) for name in names}
    assert found == {(one.page, one.table) for one in PARTS if one.table}
