"""Lines that fit a terminal: where a text breaks, and what stands below what."""

from collections.abc import Iterable
from io import StringIO

from rich.console import Console, RenderableType

from composer_plugins.cli.layout import Column, entries, prose, records, show, tables, wrapped


def printed(parts: Iterable[RenderableType], width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    with console.capture() as capture:
        show(console, parts)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_line_breaks_at_a_blank_and_a_long_word_at_its_joints() -> None:
    assert wrapped("the ratio is 0.25 at most", 12) == ["the ratio is", "0.25 at most"]
    assert wrapped("kernels/test_policy.py::test_loss_equals_loops", 30) == [
        "kernels/test_policy.py::",
        "test_loss_equals_loops",
    ]
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
    assert shown(20) == [
        *given_table,
        *("loss   default  @trl", "row 0      0.5  0.25", "row 1        1     2"),
    ]
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
