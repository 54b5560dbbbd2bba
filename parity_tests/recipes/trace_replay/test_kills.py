"""A replay that is killed at random moments loses no answer that has arrived, and asks none twice."""

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from composer_plugins.recipes.trace_replay.journal import Journal
from parity_tests.rigs.forked import ended, processes
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed
from parity_tests.rigs.scripted_faults import FaultyTeachers

CONCURRENCY = 4
MOST_ANSWERS = 5  # that the server gives during a life which ends in a kill
SECONDS = 0.02  # the most that such a life goes on after them


@pytest.mark.parametrize("kills", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_every_answer_is_there_once_after_random_kills(tmp_path: Path, kills: int) -> None:
    """The journal is checked after each kill."""
    draw, path, killed, number, status = random.Random(kills), tmp_path / "j", 0, 0, -1
    before = dict[tuple[str, str], int]()  # how often each answered request had arrived
    with FaultyTeachers(echo, delay=0.002) as server, processes(replayed) as start:
        teachers = [a_teacher(server.base_url, name) for name in "ab"]
        while killed < kills or status:
            number = 20 + len(before) // len(teachers)  # some more than have all their answers
            states = {state.id: state for state in map(a_state, range(number))}
            child = start(path, [*states.values()], teachers, concurrency=CONCURRENCY)
            if killed < kills:
                last = len(server.billed) + draw.randint(0, MOST_ANSWERS)
                while len(server.billed) < last and child.is_alive():
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, SECONDS))
                child.kill()
            status = ended(child)
            child.close()
            assert status in (0, -signal.SIGKILL)
            killed += status == -signal.SIGKILL
            with Journal(path) as journal:
                answers = {}
                for answer in journal.answers():
                    (call,) = answer.message["tool_calls"]
                    row = answer.teacher, states[answer.state].messages[0]["content"]
                    answers[row] = json.loads(call["function"]["arguments"])["command"]
                assert len(answers) == len(journal.answers())
            # Each is in the row of its own state and teacher, and only those in flight may be lost.
            assert all(command == f"{name}: {task}" for (name, task), command in answers.items())
            assert len(server.billed) - len(answers) <= CONCURRENCY
            asked = Counter((body["model"], body["messages"][0]["content"]) for body in server.requests)
            assert not [row for row, count in before.items() if asked[row] != count], "it was asked again"
            before = {row: asked[row] for row in answers}
    assert len(before) == len(server.billed) == number * len(teachers) > kills
    assert len(server.requests) > len(before)  # some were in flight at a kill
