"""The pages of `list`, `explain` and `diff` at the width of a terminal: nothing is cut off."""

from collections import Counter

import pytest

from composer_plugins.cli.console import page
from composer_plugins.losses.registry import losses
from parity_tests.rigs.commands import output


def test_a_pipe_gets_a_wide_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert page().width == 200


def numbers(text: str) -> Counter[str]:
    """The words that are numbers, without the brackets and commas around them."""
    bare = [word.strip("[](),;:") for word in text.split()]
    return Counter(word for word in bare if word.replace(".", "").lstrip("-").isdigit())


DIFFERENT = [("grpo", "ipo"), ("seq-mean-token-sum-norm@verl<0.7.1", "token-mean"), ("dpo", "kto")]
PAGES = {
    "list": ["list"],
    "list-v": ["list", "-v"],
    **{f"explain-{loss.kind}-{loss.name}": ["explain", loss.name, "--kind", loss.kind] for loss in losses()},
    **{f"diff-{one}-{other}": ["diff", one, other] for one, other in DIFFERENT},
}


@pytest.mark.thorough
@pytest.mark.parametrize("columns", (80, 120))
@pytest.mark.parametrize("words", PAGES.values(), ids=PAGES)
def test_a_page_of_any_width_has_every_letter_and_every_number(words: list[str], columns: int) -> None:
    wide, narrow = output(*words, columns=500), output(*words, columns=columns)
    lines = narrow.splitlines()
    assert len(lines) > 5 and "…" not in narrow and max(map(len, lines)) <= columns
    assert not numbers(wide) - numbers(narrow)
    assert Counter(narrow.replace("─", "").replace(" ", "")) >= Counter("".join(wide.split()))
