"""Lines that fit a terminal: where a text breaks, and what stands below what."""

from collections import Counter
from collections.abc import Iterable
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from composer_plugins.cli.layout import Column, entries, prose, records, show, tables, wrapped
from composer_plugins.losses.registry import losses
from parity_tests.rigs.commands import output


def printed(parts: Iterable[RenderableType], width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    with console.capture() as capture:
        show(console, parts)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_line_breaks_at_a_blank_and_a_long_word_at_its_joints() -> None:
    assert wrapped("the ratio is 0.25 at most", 12) == ["the ratio is", "0.25 at most"]
    file, test = "kernels/test_policy.py::", "test_loss_equals_loops"
    assert wrapped(file + test, 30) == [file, test]
    assert wrapped("test_loss_and_metrics_equal", 15) == ["test_loss_and_", "metrics_equal"]
    assert wrapped("abcdefghij", 4) == ["abcd", "efgh", "ij"]


def test_a_long_text_stands_below_its_name_where_there_is_no_room_beside_it() -> None:
    rows = [("logprobs", "[*batch, tokens]", "log pi(y_t) under the policy; carries the gradient")]
    assert printed(entries(rows, 60), 60) == [
        "logprobs  [*batch, tokens]  log pi(y_t) under the policy;",
        "                            carries the gradient",
    ]
    assert printed(entries(rows, 50), 50) == [
        "logprobs  [*batch, tokens]",
        "    log pi(y_t) under the policy; carries the",
        "    gradient",
    ]


def test_the_last_texts_stand_below_with_their_headings_where_there_is_no_room() -> None:
    columns = [
        Column("name", ["ppo", "grpo"]),
        Column("what it is", ["a loss of the larger of two", "PPO's"], is_text=True),
        Column("note", ["", "a text of more words than there is room"], is_text=True),
        Column("error", ["0.5", "12"], right=True),
    ]
    assert printed(records(columns, 80), 80) == [
        "name  what it is                        note                              error",
        "ppo   a loss of the larger of two                                           0.5",
        "grpo  PPO's                             a text of more words than there      12",
        "                                        is room",
    ]
    assert printed(records(columns, 50), 50) == [
        "name  what it is                   error",
        "ppo   a loss of the larger of two    0.5",
        "grpo  PPO's                           12",
        "    note  a text of more words than there is room",
    ]
    assert printed(records(columns, 30), 30)[:4] == [
        "name  error",
        "ppo     0.5",
        "    what it is  a loss of the",
        "                larger of two",
    ]


def test_columns_that_do_not_fit_are_tables_below_each_other() -> None:
    label, given = Column("loss", ["row 0", "row 1"]), [Column("x", ["1", "22"], right=True)]
    results = [Column("default", ["0.5", "1"], right=True), Column("@trl", ["0.25", "2"], right=True)]

    def shown(width: int) -> list[str]:
        return printed(tables(label, [given, results], width, "given"), width)

    assert shown(30) == ["loss    x  default  @trl", "row 0   1      0.5  0.25", "row 1  22        1     2"]
    given_table = ["given   x", "row 0   1", "row 1  22", ""]
    results_table = ["loss   default  @trl", "row 0      0.5  0.25", "row 1        1     2"]
    assert shown(20) == given_table + results_table
    assert shown(15)[::4] == ["given   x", "loss   default", "loss   @trl"]


def test_paragraphs_are_filled_anew_and_formulas_and_lists_are_kept() -> None:
    text = """A loss
    of tokens.

        x_t = r_t A

    - one,
      two
    - three
    Source: a paper,
    and more.
    """
    assert printed(prose(text, 40), 40) == [
        "A loss of tokens.",
        "",
        "    x_t = r_t A",
        "",
        "- one, two",
        "- three",
        "Source: a paper, and more.",
    ]


def numbers(words: list[str]) -> Counter[str]:
    """The words that are numbers, without the brackets and commas around them."""
    bare = [word.strip("[](),;:") for word in words]
    return Counter(word for word in bare if word.replace(".", "").lstrip("-").isdigit())


DIFFERENT = [("grpo", "ipo"), ("seq-mean-token-sum-norm@verl<0.7.1", "token-mean"), ("dpo", "kto")]
PAGES = {
    "list": ["list"],
    **{f"explain-{loss.kind}-{loss.name}": ["explain", loss.name, "--kind", loss.kind] for loss in losses()},
    **{f"diff-{one}-{other}": ["diff", one, other] for one, other in DIFFERENT},
}


@pytest.mark.thorough
@pytest.mark.parametrize("columns", (60, 80, 120))
@pytest.mark.parametrize("words", PAGES.values(), ids=PAGES)
def test_a_page_of_any_width_has_every_word_and_every_number_whole(words: list[str], columns: int) -> None:
    wide, narrow = output(*words, columns=500).split(), output(*words, columns=columns)
    lines, shown = narrow.splitlines(), narrow.split()
    assert len(lines) > 5 and "…" not in narrow
    assert [line for line in lines if len(line) > columns or line != line.rstrip()] == []
    if words[0] == "explain":
        tables = lines[lines.index("on the worked example") + 1 :]
        assert all(line.startswith("  ") for line in tables if line)  # a row that is too long goes on at 0
    if words[0] == "list" and columns < 110:
        wide = [word for word in wide if word not in {"name", "what", "is"}]  # headings of a wide table
    assert not numbers(wide) - numbers(shown)
    broken = {word for word in wide if word not in shown and set(word) != {"─"}}
    longest = columns // {"list": 5, "explain": 3, "diff": 1}[words[0]]
    in_columns = words[0] == "list" and columns > 60  # the parts of a word stand in several rows
    text = "".join(shown)
    assert all(len(word) > longest and (in_columns or word in text) for word in broken), broken
