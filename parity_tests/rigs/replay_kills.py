"""Kill a replaying process at random moments, and check its journal after each kill."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay import asking
from composer_plugins.recipes.trace_replay.journal import Answer, Journal
from composer_plugins.recipes.trace_replay.replay import idempotency_key
from composer_plugins.recipes.trace_replay.states import State
from parity_tests.rigs.forked import ended, processes
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed
from parity_tests.rigs.scripted_faults import FaultyTeachers

CONCURRENCY, SAMPLES, TEACHERS = 4, 2, "ab"
MOST_ANSWERS = 5  # that the server gives during a life which ends in a kill
SECONDS = 0.02  # the most that such a life goes on after them


def live(path: Path, base_url: str, states: int) -> None:
    """One life of the replaying process. It ends with status 0 when it has nothing left to ask."""
    teachers = [a_teacher(base_url, name) for name in TEACHERS]
    replayed(path, [a_state(i) for i in range(states)], teachers, samples=SAMPLES, concurrency=CONCURRENCY)


def key_of(answer: Answer, states: dict[str, State]) -> str:
    """The Idempotency-Key of the request that was answered so."""
    body = asking.chat_body(states[answer.state], a_teacher("http://unused/v1", answer.teacher))
    return idempotency_key((answer.state, answer.teacher, answer.sample), 0, body)


def kill_at_random(path: Path, kills: int) -> dict[str, Any]:
    """Kill, check, and go on until everything is asked."""
    draw, killed, before, states = random.Random(kills), 0, dict[str, int](), dict[str, State]()
    with FaultyTeachers(echo, delay=0.002) as server, processes(live) as start:
        while True:
            number = 20 + len(before) // (SAMPLES * len(TEACHERS))  # some more than have all their answers
            states |= {state.id: state for state in map(a_state, range(len(states), number))}
            child = start(path, server.base_url, number)
            if killed < kills:
                last = len(server.billed) + draw.randint(0, MOST_ANSWERS)
                while len(server.billed) < last and child.is_alive():
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, SECONDS))
                child.kill()
            status = ended(child)
            child.close()
            assert status in (0, -signal.SIGKILL), f"the replaying process ended with {status}"
            killed += status == -signal.SIGKILL
            with Journal(path) as journal:
                answers = {key_of(answer, states): answer for answer in journal.answers()}
            with server.lock:
                asked, billed = dict(server.asked), dict(server.billed)
            # An answer is written as it arrives: only those in flight may be lost.
            lost = billed.keys() - answers.keys()
            assert len(lost) <= CONCURRENCY, f"{len(lost)} answers are not in the journal"
            # An answer in the journal is not asked for again.
            again = [key for key, count in before.items() if asked[key] != count]
            assert not again, f"{len(again)} answers were asked for again"
            before = {key: asked[key] for key in answers}
            if status == 0 and killed >= kills:
                break
    for answer in answers.values():  # each answer is in the row of its own state and teacher
        (call,) = answer.message["tool_calls"]
        command = json.loads(call["function"]["arguments"])["command"]
        assert command == f"{answer.teacher}: {states[answer.state].messages[0]['content']}", command
    return {
        "kills": killed,
        "wanted": number * len(TEACHERS) * SAMPLES,
        "answered": len(answers),
        "billed": len(billed),
        "requests": sum(asked.values()),
    }
