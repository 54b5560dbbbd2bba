"""A replay over HTTP: nothing is asked twice, the budget holds, and every fault is a recorded reason."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay import asking
from composer_plugins.recipes.trace_replay.asking import Unusable, read_json, read_reply
from composer_plugins.recipes.trace_replay.journal import Journal
from composer_plugins.recipes.trace_replay.replay import MOST_IN_A_ROW, Summary, replay
from composer_plugins.recipes.trace_replay.states import State
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed
from parity_tests.rigs.scripted_faults import FaultyTeachers

STATES = [a_state(i) for i in range(6)]


@pytest.fixture
def start() -> Iterator[Callable[..., FaultyTeachers]]:
    """A function that starts a server, which is closed after the test."""
    servers: list[FaultyTeachers] = []

    def started(*args: Any, **options: Any) -> FaultyTeachers:
        servers.append(FaultyTeachers(*(args or (echo,)), **options))
        return servers[-1].__enter__()

    yield started
    for server in servers:
        server.__exit__()


Start = Callable[..., FaultyTeachers]


def usd_of(usage: dict[str, int]) -> float:
    return usage["prompt_tokens"] * 1e-6 + usage["completion_tokens"] * 4e-6


def reasons(path: Path) -> list[str]:
    with Journal(path) as journal:
        return journal.failures()


def test_every_teacher_answers_every_state_and_nothing_is_asked_again(tmp_path: Path, start: Start) -> None:
    server = start()
    teachers = [a_teacher(server.base_url, name) for name in "abc"]
    seen: list[Summary] = []
    shared = [*STATES, STATES[0]]  # two traces with the same state
    done = replayed(tmp_path / "j", shared, teachers, samples=2, seen=seen)
    assert (done.total, done.answered, done.answered_before, done.failed) == (36, 36, 0, 0)
    assert len(server.requests) == len(server.billed) == 36
    assert [(p.done, p.answered) for p in seen] == [(i, i) for i in range(37)]
    with Journal(tmp_path / "j") as journal:
        answers = [*journal.answers()]
        assert journal.spent() == pytest.approx(done.spent_usd) == pytest.approx(sum(a.usd for a in answers))
    text_of = {state.id: state.messages[0]["content"] for state in STATES}
    for answer in answers:
        (call,) = answer.message["tool_calls"]
        said = json.loads(call["function"]["arguments"])["command"]
        assert said == f"{answer.teacher}: {text_of[answer.state]}"
        assert (answer.message["role"], answer.message["content"]) == ("assistant", "")
        assert answer.finish_reason == "tool_calls"
    assert done.spent_usd == pytest.approx(sum(map(usd_of, server.billed.values())))
    again = replayed(tmp_path / "j", shared, teachers, samples=2)
    assert (again.answered, again.answered_before, len(server.requests)) == (0, 36, 36)
    more = replayed(tmp_path / "j", shared, teachers, samples=3)
    assert (more.answered, more.answered_before, len(server.requests)) == (18, 36, 54)


def test_a_request_has_the_state_the_limit_and_the_teachers_own_params(tmp_path: Path, start: Start) -> None:
    server = start()
    changes = {"params": {"temperature": 0.5, "top_k": 3}, "max_tokens": None, "max_completion_tokens": 9}
    replayed(tmp_path / "j", STATES[:1], [a_teacher(server.base_url, **changes)])
    expected = {"model": "a", "messages": STATES[0].messages, "tools": STATES[0].tools}
    assert server.requests == [expected | {"max_completion_tokens": 9, "temperature": 0.5, "top_k": 3}]


def test_refusals_that_pass_are_retried_by_the_client(tmp_path: Path, start: Start) -> None:
    server = start(faults={"a": ["429", "500", "429"], "b": [None, "500"]}, delay=0.005)
    teachers = [a_teacher(server.base_url, name) for name in "ab"]
    done = replayed(tmp_path / "j", STATES, teachers, concurrency=3)
    assert (done.answered, done.failed, len(server.requests)) == (12, 0, 12 + 4)
    assert len(server.billed) == 12 == len(server.asked)  # a retry has the key of the first request


FAULTS = [
    ("500", 'status 500: \'{"error": {"message": "scripted 500"}}\''),
    ("429", "status 429: "),
    ("truncated", "the answer is not JSON, or is cut off: "),
    ("schema", "the answer is no chat completion: choices: Field required"),
    ("drop", "the connection was lost (RemoteProtocolError: "),
    ("hang", "the endpoint sent nothing for 0.3 seconds"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_fault_is_a_recorded_failure_and_is_asked_again(
    tmp_path: Path, start: Start, fault: str, reason: str
) -> None:
    server = start(faults={"a": [fault]})
    teacher = a_teacher(server.base_url, max_retries=0, timeout=0.3)
    done = replayed(tmp_path / "j", STATES[:1], [teacher])
    assert (done.answered, done.failed) == (0, 1)
    (said,) = reasons(tmp_path / "j")
    assert said.startswith(reason) and "\n" not in said
    known = {"429": 0.0, "500": 0.0, "schema": sum(map(usd_of, server.billed.values()))}
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))
    assert done.spent_usd == pytest.approx(known.get(fault, most))
    again = replayed(tmp_path / "j", STATES[:1], [teacher])
    assert (again.answered, again.failed, reasons(tmp_path / "j")) == (1, 0, [])
    # The key is a new one, unless the endpoint may not have seen the first request or may have answered it.
    assert len(server.asked) == (1 if fault in ("drop", "hang") else 2)
    assert len(server.billed) == (2 if fault in ("truncated", "schema") else 1)


@pytest.mark.parametrize("fault", ["drop", "hang"])
def test_what_may_have_been_billed_is_not_sent_again_in_the_same_run(
    tmp_path: Path, start: Start, fault: str
) -> None:
    server = start(faults={"a": [fault]})
    done = replayed(tmp_path / "j", STATES[:1], [a_teacher(server.base_url, max_retries=5, timeout=0.3)])
    assert (done.failed, len(server.requests)) == (1, 1)


@pytest.mark.parametrize(
    ("fault", "problem", "remedy"),
    [
        ("hang", "the endpoint sent nothing for 0.3 seconds", "set a longer timeout, or start"),
        ("500", "status 500", "run again later, or with a lower --concurrency"),
    ],
)
def test_an_endpoint_that_never_answers_stops_the_replay_with_one_sentence(
    tmp_path: Path, start: Start, fault: str, problem: str, remedy: str
) -> None:
    server = start(faults={"a": repeat(fault)})
    teachers = [a_teacher(server.base_url, name, max_retries=0, timeout=0.3) for name in "ab"]
    with pytest.raises(ConfigError) as stopped:
        replayed(tmp_path / "j", [a_state(i) for i in range(40)], teachers, concurrency=8)
    expected = f"teacher 'a': {MOST_IN_A_ROW} requests in a row had no answer: {problem}; {remedy}"
    assert str(stopped.value).startswith(expected)
    asked = sum(body["model"] == "a" for body in server.requests)
    assert asked < MOST_IN_A_ROW + 8
    with Journal(tmp_path / "j") as journal:
        answered = [answer.teacher for answer in journal.answers()]
    assert answered and len(answered) == sum(body["model"] == "b" for body in server.requests)


def test_no_connection_is_one_sentence(tmp_path: Path) -> None:
    with FaultyTeachers(echo) as closed:
        pass
    teacher = a_teacher(closed.base_url, max_retries=0)
    with pytest.raises(ConfigError) as stopped:
        replayed(tmp_path / "j", STATES, [teacher])
    said = (
        f"teacher 'a': {MOST_IN_A_ROW} requests in a row had no answer: no connection to {closed.base_url} ("
    )
    assert str(stopped.value).startswith(said) and "\n" not in str(stopped.value)
    with Journal(tmp_path / "j") as journal:
        assert journal.spent() == 0.0


@pytest.mark.parametrize(
    ("status", "problem"), [("401", "the key is not"), ("402", "the account"), ("404", "there is no such")]
)
def test_a_wrong_key_or_model_stops_at_once_and_keeps_what_has_arrived(
    tmp_path: Path, start: Start, status: str, problem: str
) -> None:
    server = start(faults={"b": repeat(status)})
    teachers = [a_teacher(server.base_url, name) for name in "ab"]
    with pytest.raises(ConfigError) as stopped:
        replayed(tmp_path / "j", [a_state(i) for i in range(50)], teachers, concurrency=4)
    address = f"teacher 'b': {server.base_url} answers {status} for the model 'b': {problem}"
    assert str(stopped.value).startswith(address) and "; " in str(stopped.value)
    assert len(server.requests) <= 8
    with Journal(tmp_path / "j") as journal:
        assert len([*journal.answers()]) == len(server.billed)


def test_an_answer_without_usage_counts_with_the_most_it_can_cost(tmp_path: Path, start: Start) -> None:
    server = start(faults={"a": ["no_usage"], "free": ["no_usage"]})
    teacher = a_teacher(server.base_url)
    free = a_teacher(server.base_url, "free", usd_per_million_input=0, usd_per_million_output=0)
    done = replayed(tmp_path / "j", STATES[:1], [teacher, free])
    assert (done.answered, done.without_usage) == (2, 1)
    said = "answers that do not say what they cost: 1; they count with the most they can cost"
    assert done.remarks() == [said]
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))
    assert done.spent_usd == pytest.approx(most)


def test_an_endpoint_that_bills_beyond_its_limit_stops_the_replay(tmp_path: Path, start: Start) -> None:
    server = start(faults={"a": ["overbill"]})
    with pytest.raises(
        ConfigError, match=r"^teacher 'a': a request was billed 0.2\d+ USD, and can cost at most "
    ):
        replayed(tmp_path / "j", STATES, [a_teacher(server.base_url)], concurrency=1)
    with Journal(tmp_path / "j") as journal:
        assert len([*journal.answers()]) == len(server.requests) == 1


# The budget


def watched(journal: Journal) -> tuple[list[float], Callable[[dict[str, Any]], dict[str, Any]]]:
    """What is spent and reserved at every request, and an answer that notes it."""
    spent: list[float] = []

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        spent.append(journal.spent())
        return echo(body)

    return spent, answer


@pytest.mark.parametrize("budget_in_requests", [0.5, 1.5, 2.5, 7.0])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_the_budget_is_never_exceeded_and_is_used(
    tmp_path: Path, start: Start, budget_in_requests: float, concurrency: int
) -> None:
    teacher = a_teacher("http://unused/v1")
    states = [a_state(i) for i in range(10, 90)]
    most = asking.most_usd(teacher, asking.chat_body(states[0], teacher))
    max_usd = most * budget_in_requests
    with Journal(tmp_path / "j") as journal:
        spent, answer = watched(journal)
        server = start(answer, delay=0.002)
        options = {"samples": 1, "concurrency": concurrency, "max_usd": max_usd}
        done = asyncio.run(replay(states, [a_teacher(server.base_url)], journal, **options))
        assert max([0.0, *spent]) <= max_usd and done.spent_usd <= max_usd
        assert done.spent_usd == pytest.approx(sum(map(usd_of, server.billed.values())))
    assert done.answered + done.over_budget == done.total == 80 and done.failed == 0
    if budget_in_requests < 1:
        assert not server.requests
    else:  # what is left has no room for one more request, so nothing that fits was left out
        assert done.over_budget == 0 or done.spent_usd + most > max_usd
        assert done.answered > budget_in_requests  # requests waited for what others left


def test_what_earlier_runs_have_spent_counts(tmp_path: Path, start: Start) -> None:
    server = start()
    teacher = a_teacher(server.base_url)
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))
    first = replayed(tmp_path / "j", STATES, [teacher], max_usd=most * 1.2)
    assert 0 < first.answered < 6
    again = replayed(tmp_path / "j", STATES, [teacher], max_usd=most * 1.2)
    assert (again.answered, again.over_budget) == (0, 6 - first.answered)


def test_failures_whose_cost_is_not_known_use_up_the_budget(tmp_path: Path, start: Start) -> None:
    server = start(faults={"a": repeat("truncated")})
    teacher = a_teacher(server.base_url)
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))
    done = replayed(tmp_path / "j", STATES, [teacher], max_usd=most * 3.5)
    assert (done.failed, done.over_budget, len(server.requests)) == (3, 3, 3)
    again = replayed(tmp_path / "j", STATES, [teacher], max_usd=most * 3.5)
    assert (again.failed, again.over_budget, len(server.requests)) == (0, 6, 3)


@pytest.mark.parametrize("max_usd", [-1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none(tmp_path: Path, max_usd: float) -> None:
    with pytest.raises(ConfigError) as refused:
        replayed(tmp_path / "j", STATES, [a_teacher("http://unused/v1")], max_usd=max_usd)
    remedy = "set the most that the teachers may cost, in USD"
    assert str(refused.value) == f"--max-usd: it is {max_usd}; {remedy}"


def test_budget_0_is_for_free_teachers(tmp_path: Path, start: Start) -> None:
    server = start()
    free = a_teacher(server.base_url, "free", usd_per_million_input=0, usd_per_million_output=0)
    assert replayed(tmp_path / "j", STATES, [free], max_usd=0.0).answered == 6
    with pytest.raises(ConfigError, match="^--max-usd: it is 0, and teacher 'a' has a price; set a budget"):
        replayed(tmp_path / "j", STATES, [free, a_teacher(server.base_url)], max_usd=0.0)


@pytest.mark.parametrize("option", ["samples", "concurrency"])
def test_options_below_1(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{option}: it is 0; set a number of at least 1$"):
        replayed(tmp_path / "j", STATES, [a_teacher("http://unused/v1")], **{option: 0})
    with pytest.raises(ConfigError, match="^teachers: the list is empty; "):
        replayed(tmp_path / "j", STATES, [])


def test_an_image_has_no_bound_and_is_for_free_teachers(tmp_path: Path, start: Start) -> None:
    server = start(lambda body: {"content": "a cat"})
    content = [
        {"type": "text", "text": "what"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]
    state = State("1", [{"role": "user", "content": content}], None, {}, "log.jsonl:7", None)
    with pytest.raises(
        DataError, match="^log.jsonl:7: a message has a part of type 'image_url', whose tokens"
    ):
        replayed(tmp_path / "j", [*STATES, state], [a_teacher(server.base_url)])
    assert not server.requests
    free = a_teacher(server.base_url, usd_per_million_input=0, usd_per_million_output=0)
    assert replayed(tmp_path / "j", [state], [free]).answered == 1


# Endings


def test_cancelling_keeps_what_has_arrived_and_counts_what_was_in_flight(
    tmp_path: Path, start: Start
) -> None:
    server = start(faults={"a": [None, None, "hang", "hang"]})
    teacher = a_teacher(server.base_url)
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))

    async def cancelled() -> None:
        with Journal(tmp_path / "j") as journal:
            running = asyncio.ensure_future(
                replay(STATES, [teacher], journal, samples=1, concurrency=2, max_usd=1.0)
            )
            while len(server.requests) < 4:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(cancelled())
    with Journal(tmp_path / "j") as journal:
        answers = [*journal.answers()]
        assert (len(answers), journal.interrupted) == (2, 2)
        assert journal.spent() == pytest.approx(sum(a.usd for a in answers) + 2 * most)
    done = replayed(tmp_path / "j", STATES, [teacher], max_usd=1.0)
    assert (done.interrupted, done.answered_before, done.answered) == (2, 2, 4)
    (remark,) = done.remarks()
    assert remark.startswith("requests in flight when an earlier run ended: 2; they are sent again ")
    assert [server.asked[key] for key in server.asked] == [1, 1, 2, 2, 1, 1]  # the same keys again
    assert len(server.billed) == 6


def test_a_journal_that_cannot_be_written_any_more_is_one_sentence(tmp_path: Path, start: Start) -> None:
    server = start()
    with Journal(tmp_path / "j") as journal:
        journal._connection.execute("PRAGMA query_only = 1")
        with pytest.raises(ConfigError, match="the journal cannot be opened or written"):
            run = replay(STATES, [a_teacher(server.base_url)], journal, samples=1, concurrency=3, max_usd=1.0)
            asyncio.run(run)
    assert not server.requests


def test_the_journal_stops_a_replay_whose_disk_is_full(tmp_path: Path, start: Start) -> None:
    server = start()
    with Journal(tmp_path / "j") as journal:
        pages = journal._number("PRAGMA page_count")
        journal._connection.execute(f"PRAGMA max_page_count = {int(pages) + 1}")
        with pytest.raises(ConfigError, match="disk is full"):
            states = [a_state(i) for i in range(300)]
            run = replay(states, [a_teacher(server.base_url)], journal, samples=1, concurrency=3, max_usd=1.0)
            asyncio.run(run)
    assert len(server.requests) < 300


# What is an answer


def completion(finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant"} | message}]}


def calls(*arguments: str) -> list[dict[str, Any]]:
    function = [{"name": "run", "arguments": one} for one in arguments]
    return [{"id": "1", "type": "function", "function": one} for one in function]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({}, "the answer is no chat completion: choices: Field required"),
        ({"choices": []}, "the answer is no chat completion: choices: List should have at least 1 item"),
        ({"choices": None}, "the answer is no chat completion: choices: Input should be a valid list"),
        (completion(), "the answer has neither content nor tool calls"),
        (completion(content=None, tool_calls=[]), "the answer has neither content nor tool calls"),
        (
            completion(content=[{"type": "text"}]),
            "the answer is no chat completion: choices.0.message.content: ",
        ),
        (completion(finish=None, content="x"), "the answer is no chat completion: choices.0.finish_reason: "),  # type: ignore[arg-type]
        (completion(tool_calls=calls("{")), "the arguments of a tool call are not a JSON object: '{'"),
        (
            completion(tool_calls=calls("{}", "[1]")),
            "the arguments of a tool call are not a JSON object: '[1]'",
        ),
        (completion(tool_calls=calls('{"a": NaN}')), "the arguments of a tool call are not a JSON object: "),
        (
            completion(tool_calls=[{"id": "1"}]),
            "the answer is no chat completion: choices.0.message.tool_calls.0",
        ),
        (completion(content="\ud800"), "the answer has half of a surrogate pair"),
        (
            completion(tool_calls=calls('{"a": "\\ud800"}')),
            "the arguments of a tool call are not a JSON object",
        ),
    ],
)
def test_what_is_no_action_has_a_reason(answer: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as refused:
        read_reply(answer)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize("text", ["", "<html>502</html>", "[1]", '{"choices": [', "[" * 100_000])
def test_what_is_not_a_json_object_has_a_reason(text: str) -> None:
    with pytest.raises(Unusable) as refused:
        read_json(text)
    assert len(str(refused.value)) < 400


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
    body = asking.chat_body(state, teacher) | {
        "messages": [{"role": "user", "content": "日本語 \ud800" * 50}]
    }
    size = len(json.dumps(body["messages"], ensure_ascii=False).encode("utf-8", "surrogatepass"))
    assert asking.most_usd(teacher, body) >= (size + asking.TEMPLATE_TOKENS) * 1e-6 + 50 * 4e-6


def test_a_state_that_is_no_unicode_is_a_recorded_failure(tmp_path: Path, start: Start) -> None:
    server = start()
    state = State("1", [{"role": "user", "content": "\ud800"}], None, {}, "log.jsonl:7", None)
    done = replayed(tmp_path / "j", [state, STATES[0]], [a_teacher(server.base_url)])
    assert (done.failed, done.answered) == (1, 1)
    assert reasons(tmp_path / "j") == ["the state has half of a surrogate pair"]


def test_summaries_add_up(tmp_path: Path, start: Start) -> None:
    server = start(faults={"a": ["schema", None, "truncated"]})
    teacher = a_teacher(server.base_url)
    most = asking.most_usd(teacher, asking.chat_body(STATES[0], teacher))
    done: Summary = replayed(tmp_path / "j", STATES, [teacher], max_usd=3 * most, concurrency=1)
    assert done.total == done.answered_before + done.answered + done.failed + done.over_budget == 6
    with closing(sqlite3.connect(tmp_path / "j")) as journal:
        statuses = dict(journal.execute("SELECT status, count(*) FROM answers GROUP BY status").fetchall())
    assert statuses == {"answered": done.answered, "failed": done.failed}
