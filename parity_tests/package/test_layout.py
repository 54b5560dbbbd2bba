"""Lines that fit a terminal: where a text breaks, and what stands below what."""

from composer_plugins.cli.layout import Column, entries, prose, tables, wrapped


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
    assert [str(line) for line in entries(rows, 60)] == [
        "logprobs  [*batch, tokens]  log pi(y_t) under the policy;",
        "                            carries the gradient",
    ]
    assert [str(line) for line in entries(rows, 50)] == [
        "logprobs  [*batch, tokens]",
        "    log pi(y_t) under the policy; carries the",
        "    gradient",
    ]


def test_columns_that_do_not_fit_are_tables_below_each_other() -> None:
    label, given = Column("loss", ["row 0", "row 1"]), [Column("x", ["1", "22"])]
    results = [Column("default", ["0.5", "1"]), Column("@trl", ["0.25", "2"])]

    def shown(width: int) -> list[list[str]]:
        return [[str(line) for line in one] for one in tables(label, [given, results], width, "given")]

    assert shown(30) == [["loss    x  default  @trl", "row 0   1      0.5  0.25", "row 1  22        1     2"]]
    given_table = ["given   x", "row 0   1", "row 1  22"]
    assert shown(20) == [
        given_table,
        ["loss   default  @trl", "row 0      0.5  0.25", "row 1        1     2"],
    ]
    assert [table[0] for table in shown(15)] == ["given   x", "loss   default", "loss   @trl"]


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
    assert [str(line) for line in prose(text, 40)] == [
        "A loss of tokens.",
        "",
        "    x_t = r_t A",
        "",
        "- one, two",
        "- three",
        "Source: a paper, and more.",
    ]
