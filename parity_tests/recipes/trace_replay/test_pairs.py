"""Pairs: when teachers agree on one action, when outcomes differ, and what is dropped."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from composer_plugins.columns import pairs_of
from composer_plugins.errors import ConfigError
from composer_plugins.recipes.trace_replay import pairs, report
from composer_plugins.recipes.trace_replay.formats.common import assistant, tool_call
from composer_plugins.recipes.trace_replay.journal import Answer
from composer_plugins.recipes.trace_replay.pairs import Pair, make_pairs
from composer_plugins.recipes.trace_replay.states import Message, State, state_id

ASKED = [{"role": "user", "content": "go"}]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("Bash", "Read", "f")]


def calls(*given: tuple[str, str], content: str = "") -> Message:
    return assistant(content, [tool_call(f"c{i}", *one) for i, one in enumerate(given)])


def bash(command: str, **rest: Any) -> Message:
    return calls(("Bash", json.dumps({"command": command, **rest})))


def text(words: str) -> Message:
    return assistant(words, [])


def state(observed: Message, outcome: float | None = None, source: str = "f:1") -> State:
    return State(state_id(ASKED, TOOLS), ASKED, TOOLS, observed, source, outcome)


def answer(teacher: str, message: Message, sample: int = 0, finish: str = "stop") -> Answer:
    return Answer(state_id(ASKED, TOOLS), teacher, sample, 0.0, message, finish)


def answers(*messages: Message) -> list[Answer]:
    return [answer(f"t{i}", message) for i, message in enumerate(messages)]


def result(states: Sequence[State], given: Sequence[Answer], **options: Any) -> Counter[str]:
    found, counts = make_pairs(states, given, **options)
    assert len(found) == sum(n for name, n in counts.actions.items() if name.startswith("pair by"))
    assert (counts.actions.total(), counts.answers.total()) == (len(states), len(given))
    return +counts.actions


LS, PWD, CAT = bash("ls"), bash("pwd"), bash("cat x")
ALL_TOOLS = calls(("Bash", "{}"), ("Read", "{}"), ("f", "{}"))
AGREEMENT, FEWER, AS_TRACE = (
    "pair by agreement",
    "fewer than 2 teachers agree",
    "the teachers agree with the trace",
)
OUTCOME, UNDECIDED = "pair by outcome", "both actions were taken, and their outcomes do not make a pair"
EARNED, AGAIN = "the trace's action earned an outcome above 0", "the same action was taken there before"
NO_JSON = "the arguments of a tool call are not a JSON object"
NO_VOTE = "no teacher gave an answer that can be compared"
BROKEN = calls(("Bash", '{"command": '))
RULES: list[tuple[list[Message | tuple[Message, float]], list[Message], dict[str, int]]] = [
    ([CAT], [LS, PWD, LS], {AGREEMENT: 1}),
    ([ALL_TOOLS], [LS, LS], {AGREEMENT: 1}),
    ([CAT], [ALL_TOOLS, ALL_TOOLS], {AGREEMENT: 1}),
    ([CAT], [LS, PWD, CAT], {FEWER: 1}),
    ([CAT], [LS, LS, PWD, PWD], {"two actions have the most votes": 1}),
    ([CAT], [CAT, CAT, LS], {AS_TRACE: 1}),
    ([CAT], [], {NO_VOTE: 1}),
    ([BROKEN], [LS, LS], {NO_JSON: 1}),
    ([(CAT, 0.0), (BROKEN, 1.0)], [], {NO_JSON: 1, NO_VOTE: 1}),
    ([calls(("Task", "{}"))], [LS, LS], {"the trace calls a tool that the teachers were not offered": 1}),
    # Outcomes of traces with the same state.
    ([(CAT, 0.0), (CAT, 0.4), (LS, 0.5), (LS, 1.0)], [], {OUTCOME: 1, NO_VOTE: 1, AGAIN: 2}),
    ([(CAT, 0.0), (CAT, 0.5), (LS, 0.5), (LS, 1.0)], [], {NO_VOTE: 2, AGAIN: 2}),
    ([(text("4"), 1.0), (text("4"), 0.0)], [], {NO_VOTE: 1, AGAIN: 1}),
    ([CAT, (LS, 0.0)], [LS, LS], {AGREEMENT: 1, AS_TRACE: 1}),
    ([(CAT, 0.1)], [LS, LS], {EARNED: 1}),
    ([(CAT, 0.0)], [LS, LS], {AGREEMENT: 1}),
    ([(CAT, 1.0), (CAT, 0.0)], [LS, LS], {EARNED: 1, AGAIN: 1}),
    ([(CAT, -1.0), (LS, 0.0)], [CAT, CAT, CAT], {OUTCOME: 1, UNDECIDED: 1}),  # the teachers prefer the worse
]


@pytest.mark.parametrize(("traces", "given", "expected"), RULES)
def test_what_becomes_of_each_action(
    traces: list[Message | tuple[Message, float]], given: list[Message], expected: dict[str, int]
) -> None:
    seen = [state(*one) if isinstance(one, tuple) else state(one) for one in traces]
    assert result(seen, answers(*given)) == expected


def test_the_majority_is_chosen_over_the_trace() -> None:
    (pair,), _ = make_pairs([state(CAT)], answers(LS, PWD, LS))
    assert (pair.chosen, pair.rejected, pair.prompt) == ([LS], [CAT], ASKED)
    assert (pair.n_teachers_agreeing, pair.n_teachers, pair.made_by) == (2, 3, "agreement")
    assert json.loads(pair.tools or "") == TOOLS


SAME = [
    (calls(("f", '{"a": 1, "b": [2]}')), calls(("f", '{"b":[2],"a":1}'), content="now")),
    (calls(("f", "{}"), ("Read", '{"x": 1}')), calls(("Read", '{"x":1}'), ("f", " {} "))),
    (calls(("f", '{"x": "\\u00e9"}')), calls(("f", '{"x": "é"}'))),
]
OTHER = [
    (calls(("f", '{"a": 1}')), calls(("f", '{"a": "1"}'))),
    (calls(("f", '{"a": true}')), calls(("f", '{"a": 1}'))),
    (calls(("f", "{}")), calls(("f", "{}"), ("f", "{}"))),  # a multiset
    (calls(("f", '{"a": [1, 2]}')), calls(("f", '{"a": [2, 1]}'))),
    (calls(("f", "{}")), calls(("Read", "{}"))),
    (calls(("f", '{"a": null}')), calls(("f", "{}"))),
]


@pytest.mark.parametrize(("one", "other", "agree"), [(*p, True) for p in SAME] + [(*p, False) for p in OTHER])
def test_what_is_the_same_action(one: Message, other: Message, agree: bool) -> None:
    expected = {AGREEMENT if agree else FEWER: 1}
    assert result([state(CAT)], answers(one, other)) == expected
    assert result([state(one)], answers(other, other)) == {AS_TRACE if agree else AGREEMENT: 1}


def test_the_number_of_teachers_that_must_agree() -> None:
    expected = {"fewer than 3 teachers agree": 1}
    assert result([state(CAT)], answers(LS, LS), min_agree=3) == expected


def test_an_argument_that_is_ignored_is_no_part_of_an_action() -> None:
    seen = [state(bash("ls", description="look"))]
    given = answers(bash("ls", description="list"), bash("ls"))
    assert result(seen, given) == {FEWER: 1}
    ignored = pairs.ignored_arguments(["Bash.description"], seen)
    assert result(seen, given, ignored=ignored) == {AS_TRACE: 1}
    with pytest.raises(ConfigError, match=r"--ignore: .*did you mean 'Bash.description'"):
        pairs.ignored_arguments(["Bash.descripton"], seen)


def test_a_teacher_has_one_vote_for_what_it_did_most_often() -> None:
    given = [answer("a", message, i) for i, message in enumerate((LS, LS, PWD))]
    assert result([state(CAT)], given) == {FEWER: 1}
    given += [answer("b", PWD, 0), answer("b", PWD, 1), answer("c", LS)]
    given += [answer("d", LS, 0), answer("d", PWD, 1)]  # is undecided
    (pair,), _ = make_pairs([state(CAT)], given)
    assert (pair.chosen, pair.n_teachers_agreeing, pair.n_teachers) == ([LS], 2, 3)


DROPPED = [
    (bash("ls"), "length", "it ended with finish_reason length"),
    (calls(("Write", "{}")), "stop", "it calls a tool that the state does not have"),
]


@pytest.mark.parametrize(("message", "finish", "reason"), DROPPED)
def test_an_answer_that_cannot_be_used_is_dropped_and_counted(
    message: Message, finish: str, reason: str
) -> None:
    given = [answer("a", LS), answer("b", message, finish=finish)]
    found, counts = make_pairs([state(CAT)], given)
    assert not found and counts.answers == {"compared": 1, f"dropped: {reason}": 1}
    (pair,), _ = make_pairs([state(CAT)], [*given, answer("c", LS)])
    assert pair.n_teachers == 2


def test_a_text_agrees_with_nothing() -> None:
    found, counts = make_pairs([state(text("a"))], answers(text("a"), text("a"), LS, LS))
    assert [pair.chosen for pair in found] == [[LS]] and found[0].n_teachers == 4
    assert counts.answers == {"compared": 2, "text alone, which agrees with nothing": 2}


def test_an_answer_to_another_state_is_counted() -> None:
    other = Answer("0" * 16, "t", 0, 0.0, LS, "stop")
    assert make_pairs([state(CAT)], [other])[1].answers == {"to a state that is not in states.jsonl": 1}


def test_traces_of_one_state_with_different_outcomes_make_a_pair_by_themselves() -> None:
    (pair,), _ = make_pairs([state(CAT, 0.0, "f:1"), state(LS, 1.0, "f:2")], [])
    assert (pair.chosen, pair.rejected, pair.made_by, pair.source) == ([LS], [CAT], "outcome", "f:1")
    assert pair.n_teachers_agreeing is None and pair.n_teachers == 0
    (pair,), _ = make_pairs([state(text("4"), 1.0), state(text("5"), 0.0)], [])
    assert pair.chosen == [text("4")]


# Files.


def test_the_parquet_file_and_the_card_are_a_data_set(tmp_path: Path) -> None:
    seen = [state(CAT), state(text("no"), 0.0), state(LS, 1.0)]
    found, counts = make_pairs(seen, answers(PWD, PWD))
    assert len(found) == 2
    report.write_pairs(found, tmp_path / report.PAIRS)
    shown = {"different secrets": {"JWT": 1, "none": 0}, "answers": counts.answers}
    card = report.card(found, is_redacted=True, counts=shown)
    (tmp_path / report.CARD).write_text(card)
    parts = "2 pairs, 1 by agreement and 1 by outcome", "| JWT | 1 |", "| compared | 2 |", "detect-secrets"
    assert all(part in card for part in parts) and "none" not in card
    assert "Nothing was redacted" in report.card(found, is_redacted=False, counts={})
    rows = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / "cache"), split="train")
    assert rows.column_names == list(Pair._fields) == list(report.COLUMNS)
    for row, pair in zip(rows, found, strict=True):
        (one,) = pairs_of(row)
        assert one.weight == (pair.n_teachers_agreeing or 1)
        kept = {key: value for key, value in one.chosen[0].items() if value is not None}
        assert kept == pair.chosen[0] and json.loads(row["tools"]) == TOOLS
