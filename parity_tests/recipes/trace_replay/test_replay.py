"""A replay over HTTP: nothing is asked twice, the budget holds, and every fault is a recorded reason."""

import asyncio
import json
import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.trace_replay import request
from composer_plugins.recipes.trace_replay.journal import Journal
from composer_plugins.recipes.trace_replay.replay import MOST_IN_A_ROW, Summary, replay
from composer_plugins.recipes.trace_replay.request import Unusable, read_answer, read_reply
from parity_tests.rigs.replayed import FREE, a_state, a_teacher, echo, most_usd, replayed, usd_of
from parity_tests.rigs.scripted_faults import FaultyTeachers

STATES = [a_state(i) for i in range(6)]


@pytest.fixture
def server() -> Iterator[FaultyTeachers]:
    """Teachers that answer; a test may set `faults`, by model what goes wrong with its next requests."""
    with FaultyTeachers(echo) as started:
        yield started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The journal of a replay."""
    return tmp_path / "j"


def reasons(path: Path) -> list[str]:
    with Journal(path) as journal:
        return journal.failures()


def test_every_teacher_answers_every_state_and_nothing_is_asked_again(
    path: Path, server: FaultyTeachers
) -> None:
    teachers = [a_teacher(server.base_url, name) for name in "abc"]
    seen: list[Summary] = []
    shared = [*STATES, STATES[0]]  # two traces with the same state
    done = replayed(path, shared, teachers, samples=2, seen=seen)
    assert (done.total, done.answered, done.answered_before, done.failed) == (36, 36, 0, 0)
    assert len(server.requests) == len(server.billed) == 36
    assert [(p.done, p.answered) for p in seen] == [(i, i) for i in range(37)]
    with Journal(path) as journal:
        answers = journal.answers()
        assert journal.spent == pytest.approx(done.spent_usd) == pytest.approx(sum(a.usd for a in answers))
    for answer in answers:
        assert (answer.message["role"], answer.message["content"]) == ("assistant", "")
        assert answer.finish_reason == "tool_calls"
    assert done.spent_usd == pytest.approx(sum(map(usd_of, server.billed.values())))
    again = replayed(path, shared, teachers, samples=2)
    assert (again.answered, again.answered_before, len(server.requests)) == (0, 36, 36)
    more = replayed(path, shared, teachers, samples=3)
    assert (more.answered, more.answered_before, len(server.requests)) == (18, 36, 54)


def test_a_request_has_the_state_the_limit_and_the_teachers_own_params(
    path: Path, server: FaultyTeachers
) -> None:
    changes = {"params": {"temperature": 0.5, "top_k": 3}, "max_tokens": None, "max_completion_tokens": 9}
    replayed(path, STATES[:1], [a_teacher(server.base_url, **changes)])
    expected = {"model": "a", "messages": STATES[0].messages, "tools": STATES[0].tools}
    assert server.requests == [expected | {"max_completion_tokens": 9, "temperature": 0.5, "top_k": 3}]


def test_refusals_that_pass_are_retried_by_the_client(path: Path, server: FaultyTeachers) -> None:
    server.faults = {"a": iter(["429", "500", "429"]), "b": iter([None, "500"])}
    server.delay = 0.005
    teachers = [a_teacher(server.base_url, name) for name in "ab"]
    done = replayed(path, STATES, teachers, concurrency=3)
    assert (done.answered, done.failed, len(server.requests)) == (12, 0, 12 + 4)
    assert len(server.billed) == 12 == len(server.asked)  # a retry has the key of the first request


FAULTS = [
    ("500", 'status 500: \'{"error": {"message": "scripted 500"}}\''),
    ("429", "status 429: "),
    ("truncated", "the answer is not a JSON object, or is cut off: "),
    ("schema", "the answer is no chat completion: choices: Field required"),
    ("drop", "the connection was lost (RemoteProtocolError: "),
    ("hang", "the endpoint sent nothing for 0.3 seconds"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_fault_is_a_recorded_failure_and_is_asked_again(
    path: Path, server: FaultyTeachers, fault: str, reason: str
) -> None:
    server.faults = {"a": iter([fault])}
    teacher = a_teacher(server.base_url, max_retries=5 if fault in ("drop", "hang") else 0, timeout=0.3)
    done = replayed(path, STATES[:1], [teacher])
    assert (done.answered, done.failed) == (0, 1)
    (said,) = reasons(path)
    assert said.startswith(reason) and "\n" not in said
    known = {"429": 0.0, "500": 0.0, "schema": sum(map(usd_of, server.billed.values()))}
    assert done.spent_usd == pytest.approx(known.get(fault, most_usd(teacher)))
    assert len(server.requests) == 1  # what may have been billed is not sent again in the same run
    again = replayed(path, STATES[:1], [teacher])
    assert (again.answered, again.failed, reasons(path)) == (1, 0, [])
    assert len(server.asked) == 2  # the key is a new one


NO_ANSWER = f"teacher 'a': {MOST_IN_A_ROW} requests in a row had no answer: "
STATUS = "teacher 'b': http://.* answers for the model 'b' with status"
STOPS = [
    ("a", "hang", f"{NO_ANSWER}the endpoint sent nothing for 1 seconds; start the endpoint again, set a"),
    ("a", "500", f"{NO_ANSWER}status 500: .*; start the endpoint again"),
    ("b", "401", f"{STATUS} 401: .*; correct the key, the model or base_url in --teachers$"),
    ("b", "402", f"{STATUS} 402: .*; add credits to the account of the key"),
    ("b", "403", f"{STATUS} 403: .*; correct .* or run the same command again$"),
    ("b", "404", f"{STATUS} 404: .*; correct the key, the model or base_url in --teachers$"),
]


@pytest.mark.parametrize(("name", "fault", "message"), STOPS)
def test_a_teacher_that_cannot_answer_stops_the_replay(
    path: Path, server: FaultyTeachers, name: str, fault: str, message: str
) -> None:
    """With one sentence, at once if its key or model is wrong. What has arrived stays."""
    server.faults = {name: repeat(fault)}
    options = {"max_retries": 0, "timeout": 1.0 if fault == "hang" else 10.0}
    teachers = [a_teacher(server.base_url, name, **options) for name in "ab"]
    with pytest.raises(ConfigError, match=f"^{message}"):
        replayed(path, [a_state(i) for i in range(50)], teachers, concurrency=4)
    asked = sum(body["model"] == name for body in server.requests)
    assert asked <= 4 if name == "b" else asked < MOST_IN_A_ROW + 4
    with Journal(path) as journal:
        assert len(journal.answers()) == len(server.billed) and (server.billed or name == "b")


@pytest.mark.parametrize("number", [0, 3])
def test_a_prompt_that_is_always_refused_does_not_keep_the_others_from_answers(
    path: Path, server: FaultyTeachers, number: int
) -> None:
    """A status of 403 stops the replay once, if the teacher has not answered before."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        server.faults["a"] = iter(["403"] * (body["messages"] == STATES[number].messages))
        return echo(body)

    serve = server.serve
    server.serve = lambda body, key: answer(body) and serve(body, key)  # type: ignore[method-assign]
    teacher = a_teacher(server.base_url, max_retries=0)
    if number == 0:
        with pytest.raises(ConfigError, match="status 403"):
            replayed(path, STATES, [teacher], concurrency=1)
    for new in (5, 0):
        done = replayed(path, STATES, [teacher], concurrency=1)
        assert (done.answered, done.failed) == (new, 1)
    assert reasons(path) == ['status 403: \'{"error": {"message": "scripted 403"}}\'']


def test_failures_that_are_not_in_a_row_do_not_stop_the_replay(path: Path, server: FaultyTeachers) -> None:
    server.faults = {"a": iter([*["500"] * (MOST_IN_A_ROW - 1), None] * 2)}
    teacher = a_teacher(server.base_url, max_retries=0)
    done = replayed(path, [a_state(i) for i in range(2 * MOST_IN_A_ROW)], [teacher], concurrency=1)
    assert (done.answered, done.failed) == (2, 2 * (MOST_IN_A_ROW - 1))


def test_no_connection_is_one_sentence(path: Path) -> None:
    with FaultyTeachers(echo) as closed:
        pass
    with pytest.raises(ConfigError) as stopped:
        replayed(path, STATES, [a_teacher(closed.base_url, max_retries=0)])
    said = str(stopped.value)
    assert said.startswith(f"{NO_ANSWER}no connection to {closed.base_url} (") and "\n" not in said
    with Journal(path) as journal:
        assert journal.spent == 0.0


def test_an_answer_without_usage_counts_with_the_most_it_can_cost(path: Path, server: FaultyTeachers) -> None:
    server.faults = {"a": iter(["no_usage"]), "free": iter(["no_usage"])}
    teachers = [a_teacher(server.base_url), a_teacher(server.base_url, "free", **FREE)]
    done = replayed(path, STATES[:1], teachers)
    assert (done.answered, done.without_usage) == (2, 1)
    assert done.spent_usd == pytest.approx(most_usd(teachers[0]))


# The budget


@pytest.mark.parametrize("budget_in_requests", [0.5, 1.5, 2.5, 7.0])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_budget_is_never_exceeded_and_is_used(
    path: Path, server: FaultyTeachers, budget_in_requests: float, concurrency: int
) -> None:
    states = [a_state(i) for i in range(10, 90)]
    most = most_usd(a_teacher("http://unused/v1")) + 1e-6  # these states have one byte more
    max_usd, reserved, lock = most * budget_in_requests, [0.0], Lock()
    server.delay = 0.002
    with Journal(path) as journal:

        def answer(body: dict[str, Any]) -> dict[str, Any]:
            with lock:  # what is spent, and what the requests may cost that the journal does not have yet
                reserved.append(journal.spent + most * (len(server.requests) - len(journal.answers())))
            return echo(body)

        server.answer = answer
        options = {"samples": 1, "concurrency": concurrency, "max_usd": max_usd}
        done = asyncio.run(replay(states, [a_teacher(server.base_url)], journal, **options))
    assert max(reserved) <= max_usd + 1e-9 and done.spent_usd <= max_usd
    assert done.spent_usd == pytest.approx(sum(map(usd_of, server.billed.values())))
    assert done.answered + done.over_budget == done.total == 80 and done.failed == 0
    if budget_in_requests < 1:
        assert not server.requests
    else:  # what is left has no room for one more request, so nothing that fits was left out
        assert done.over_budget == 0 or done.spent_usd + most > max_usd
        assert done.answered > budget_in_requests  # requests waited for what others left


@pytest.mark.parametrize(("faults", "room"), [((), 1.2), (repeat("truncated"), 3.5)])
def test_what_earlier_runs_have_spent_counts(
    path: Path, server: FaultyTeachers, faults: Any, room: float
) -> None:
    """Also for failures, whose cost is not known and counts with the most."""
    server.faults = {"a": iter(faults)}
    teacher = a_teacher(server.base_url)
    first = replayed(path, STATES, [teacher], max_usd=most_usd(teacher) * room)
    asked = len(server.requests)
    assert 0 < asked < 6 and (first.answered, first.failed) == ((0, 3) if faults else (asked, 0))
    assert first.over_budget == 6 - asked
    again = replayed(path, STATES, [teacher], max_usd=most_usd(teacher) * room)
    assert (again.answered, again.failed, again.over_budget) == (0, 0, 6 - first.answered)
    assert len(server.requests) == asked


def test_budget_0_is_for_free_teachers(path: Path, server: FaultyTeachers) -> None:
    both = [a_teacher(server.base_url, "free", **FREE), a_teacher(server.base_url)]
    done = replayed(path, STATES, both, max_usd=0.0)
    assert (done.answered, done.over_budget) == (6, 6)
    assert done.rest_usd == pytest.approx(6 * most_usd(both[1]))


# Endings


def test_a_journal_that_cannot_be_written_stops_the_replay(path: Path, server: FaultyTeachers) -> None:
    states = [a_state(i) for i in range(300)]
    teacher = a_teacher(server.base_url)
    said = pytest.raises(ConfigError, match="cannot be written .No space left on device")
    with said, Journal(path) as journal, open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), journal._file.fileno())
        asyncio.run(replay(states, [teacher], journal, samples=1, concurrency=3, max_usd=1.0))
    assert len(server.requests) < 10


# What is an answer


def completion(finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant"} | message}]}


def calls(*arguments: str) -> list[dict[str, Any]]:
    function = [{"name": "run", "arguments": one} for one in arguments]
    return [{"id": "1", "type": "function", "function": one} for one in function]


NOTHING = "the answer has neither content nor tool calls"
NO_COMPLETION = "the answer is no chat completion: choices"
NO_OBJECT = "the arguments of a tool call are not a JSON object: "
NO_JSON = "the answer is not a JSON object, or is cut off: "
ERROR = "the endpoint says that there was an error: "
NO_ACTION: list[tuple[dict[str, Any] | str, str]] = [
    *((text, NO_JSON) for text in ("", "<html>502</html>", "[1]", '{"choices": [', "[" * 100_000)),
    ({"error": {"code": 402}}, f"{ERROR}'{{\"code\": 402}}'"),
    (completion("error", content=""), f'{ERROR}\'{{"finish_reason": "error"}}\''),
    ({"choices": [completion(content="x")["choices"][0] | {"error": "why"}]}, f"{ERROR}'\"why\"'"),
    ({"choices": []}, f"{NO_COMPLETION}: List should have at least 1 item"),
    (completion(), NOTHING),
    (completion(content=" "), NOTHING),
    (completion(content=None, tool_calls=[]), NOTHING),
    (completion(content=[{"type": "text"}]), f"{NO_COMPLETION}.0.message.content: "),
    (completion(finish=None, content="x"), f"{NO_COMPLETION}.0.finish_reason: "),  # type: ignore[arg-type]
    (completion(tool_calls=[{"id": "1"}]), f"{NO_COMPLETION}.0.message.tool_calls.0"),
    (completion(tool_calls=calls("{")), f"{NO_OBJECT}'{{'"),
    (completion(tool_calls=calls("{}", "[1]")), f"{NO_OBJECT}'[1]'"),
]


@pytest.mark.parametrize(("answer", "reason"), NO_ACTION, ids=range(len(NO_ACTION)))
def test_what_is_no_action_has_a_short_reason(answer: dict[str, Any] | str, reason: str) -> None:
    with pytest.raises(Unusable) as refused:
        read_reply(read_answer(answer) if isinstance(answer, str) else answer)
    assert str(refused.value).startswith(reason) and len(str(refused.value)) < 400


def test_an_answer_that_is_cut_off_or_refused_is_kept_with_its_reason() -> None:
    assert read_reply(completion(content="hm")) == ({"role": "assistant", "content": "hm"}, "stop")
    nothing = {"role": "assistant", "content": ""}
    for finish in ("length", "content_filter"):
        assert read_reply(completion(finish)) == (nothing, finish)
    whole, cut = calls('{"a": 1}', '{"b": ')
    expected = {"role": "assistant", "content": "", "tool_calls": [whole]}
    assert read_reply(completion("length", tool_calls=[whole, cut])) == (expected, "length")
    refused = {"role": "assistant", "content": "I cannot"}
    assert read_reply(completion(content=None, refusal="I cannot")) == (refused, "refusal")
    (call,) = read_reply(completion(tool_calls=calls(""))).message["tool_calls"]
    assert call["function"]["arguments"] == "{}"


def test_the_most_a_request_can_cost_is_above_its_bytes() -> None:
    teacher, state = a_teacher("http://unused/v1"), a_state(1)
    messages = [{"role": "user", "content": "日本語" * 50}]
    body = request.chat_body(state, teacher) | {"messages": messages}
    size = len(json.dumps(body["messages"], ensure_ascii=False).encode())
    assert request.most_usd(teacher, body) >= (size + request.TEMPLATE_TOKENS) * 1e-6 + 50 * 4e-6
