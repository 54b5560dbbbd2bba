"""A teacher's log-probabilities of the observed action, as parquet and for the hint channel."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.prime_rl.store import Store
from composer_plugins.recipes.prime_rl.stored_stamps import stamp_from_store
from composer_plugins.recipes.trace_replay import asking, logprobs
from composer_plugins.recipes.trace_replay.journal import Journal, Score
from parity_tests.rigs.prime_rl_nodes import Branch, Trace, answer, prompt
from parity_tests.rigs.replayed import a_state, a_teacher, echo, most_usd, replayed, usd_of
from parity_tests.rigs.scripted_faults import FaultyTeachers, logprob

STATES = [a_state(1), a_state(2)]


def text(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))  # the scripted teachers have one token for each character


def test_each_observed_action_is_scored_once(tmp_path: Path) -> None:
    other = replace(STATES[0], observed={"role": "assistant", "content": "no"}, source="x:3")
    with FaultyTeachers(echo) as server:
        teachers = [a_teacher(server.base_url, "a", logprobs="prompt"), a_teacher(server.base_url, "b")]
        done = replayed(tmp_path / "j", [*STATES, other, STATES[0]], teachers)
        assert (done.total, done.answered, len(server.requests)) == (7, 7, 4 + 2 * 3)
        again = replayed(tmp_path / "j", [*STATES, other], teachers)
        assert (again.answered_before, len(server.requests)) == (7, 10)
        cost = [usd_of(usage) for usage in server.billed.values()]
        assert done.spent_usd == pytest.approx(sum(cost)) and len(cost) == 10
    with Journal(tmp_path / "j") as journal:
        assert len([*journal.answers()]) == 4
        scores = {score.state: score for score in journal.scores()}
    assert {*scores} == {logprobs.scored_id(state) for state in (*STATES, other)}
    for state in (*STATES, other):
        score = scores[logprobs.scored_id(state)]
        before = f"<user>{state.messages[0]['content']}null\n<assistant>"
        assert text(score.token_ids[: score.start]) == before
        assert text(score.token_ids[score.start :]).startswith(state.observed["content"] or "[{")
        assert score.logprobs == [0.0, *map(logprob, score.token_ids[1:])]


def test_scores_are_within_the_budget(tmp_path: Path) -> None:
    with FaultyTeachers(echo) as server:
        teacher = a_teacher(server.base_url, logprobs="prompt")
        done = replayed(tmp_path / "j", STATES[:1], [teacher], max_usd=most_usd(teacher))
        assert (done.answered, done.over_budget, len(server.requests)) == (1, 1, 1)


def test_an_endpoint_without_them_stops_the_replay(tmp_path: Path) -> None:
    said = r"^teacher 'a', logprobs: the endpoint gives no log-probabilities of a prompt \(prompt_token_ids, "
    with FaultyTeachers(echo, faults={"a": [None, "no_logprobs", "no_logprobs"]}) as server:
        teacher = a_teacher(server.base_url, logprobs="prompt")
        with pytest.raises(ConfigError, match=f"{said}.*; remove it, or use a vLLM server$"):
            replayed(tmp_path / "j", STATES, [teacher], concurrency=1)


SECOND, THIRD = {"6": {"logprob": -1}}, {"7": {"logprob": -2}}
WHOLE = {"prompt_token_ids": [5, 6, 7], "prompt_logprobs": [None, SECOND, THIRD]}
OTHER_PROMPT = "chat template: it renders prompt \\+ completion differently"
NO_LOGPROB = "prompt_logprobs has no log-probability"


@pytest.mark.parametrize(
    ("before", "given", "reason"),
    [
        ([5, 9], [None, SECOND, THIRD], OTHER_PROMPT),
        ([5, 6, 7], [None, SECOND, THIRD], OTHER_PROMPT),
        ([5, 6], [None, SECOND], NO_LOGPROB),
        ([5, 6], [None, SECOND, {"8": {"logprob": -1}}], NO_LOGPROB),
        ([5, 6], [None, SECOND, 3], NO_LOGPROB),
        ([5, 6], [None, SECOND, {"7": {"logprob": float("nan")}}], "a log-pr"),
    ],
)
def test_an_answer_that_does_not_score_the_action_has_a_reason(
    before: list[int], given: list[Any], reason: str
) -> None:
    with pytest.raises(asking.Unusable, match=f"^the action was not scored: {reason}"):
        whole = WHOLE | {"prompt_logprobs": given}
        logprobs.read_score({"prompt_token_ids": before}, whole, a_teacher("http://unused/v1"))


def test_scores_as_parquet(tmp_path: Path) -> None:
    score = Score(logprobs.scored_id(STATES[1]), "a", [5, 6, 7], [0.0, -1.0, -2.0], 2)
    scores = [score, Score("gone", "a", [1], [0.0], 0)]
    assert logprobs.write_scores(scores, STATES, tmp_path / logprobs.SCORES) == 1
    (row,) = pq.read_table(tmp_path / logprobs.SCORES).to_pylist()
    expected = {"state": STATES[1].id, "source": "log.jsonl:2", "teacher": "a"}
    assert row == expected | {"prompt_token_ids": [5, 6], "token_ids": [7], "logprobs": [-2.0]}
    assert logprobs.write_scores([], STATES, tmp_path / "none.parquet") == 0
    assert pq.read_table(tmp_path / "none.parquet").column_names == list(logprobs.SCORE_COLUMNS)


def test_a_score_is_the_hint_channels_reference_of_the_same_tokens(tmp_path: Path) -> None:
    """A branch with an earlier turn; the template writes token 10 after the policy's last token, 9."""
    score = Score("s", "a", [1, 2, 9, 10, 3, 4, 9, 10], [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0], 5)
    assert logprobs.write_references([score], tmp_path / "store", last_token=9) == 1
    first, last = answer([1, 2, 9], [-0.1] * 2), answer([4, 9], [-0.1] * 2)
    trace = Trace([Branch([first, prompt(10, 3), last])])
    assert stamp_from_store(trace, Store(tmp_path / "store")) == 1
    assert (first.reference_logprobs, last.reference_logprobs) == ([-1.0, -2.0], [-5.0, -6.0])
    assert logprobs.write_references([score], tmp_path / "whole") == 1
    assert stamp_from_store(trace, Store(tmp_path / "whole")) == 0  # another branch


def test_a_store_takes_the_scores_of_one_teacher_that_end_the_turn(tmp_path: Path) -> None:
    a, b = (Score("s", name, [1, 2], [0.0, -1.0], 1) for name in "ab")
    said = "^scores: there are scores of a and b, and a token has one reference; "
    with pytest.raises(DataError, match=said):
        logprobs.write_references([a, b], tmp_path / "store")
    with pytest.raises(DataError, match="^last_token: an action has no token 1; pass the id with which"):
        logprobs.write_references([a], tmp_path / "other", last_token=1)
