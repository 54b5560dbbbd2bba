"""Kill a replaying process at random moments, and check its journal after each kill.

    python -m parity_tests.rigs.replay_kills FOLDER KILLS MAX_USD

This process has imported everything before it forks, so a life of the replaying process costs milliseconds.
The server runs in a process of its own. It prints what was found, as JSON, and fails at the first fault.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from contextlib import closing, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay.journal import Journal
from composer_plugins.recipes.trace_replay.replay import replay
from composer_plugins.recipes.trace_replay.states import State
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed, usd_of
from parity_tests.rigs.scripted_faults import FaultyTeachers

CONCURRENCY, SAMPLES, TEACHERS = 4, 2, "ab"
MOST_ANSWERS = 5  # that the server gives during a life which ends in a kill
SECONDS = 0.02  # the most that such a life goes on after them


def states_of(answered: int) -> list[State]:
    """The states of a life: some more than those that have all their answers."""
    return [a_state(i) for i in range(20 + answered // (SAMPLES * len(TEACHERS)))]


def serve(pipe: Connection, given: Any) -> None:
    """Run the server, and answer "counts" with what it has counted; `given` is the number of its answers."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        given.value += 1
        return echo(body)

    with FaultyTeachers(answer, delay=0.002) as server:
        pipe.send(server.base_url)
        with suppress(EOFError):
            while pipe.recv():
                with server.lock:
                    pipe.send((dict(server.asked), dict(server.billed)))


def live(path: Path, base_url: str, states: list[State], max_usd: float) -> None:
    """One life of the replaying process. It ends with status 0 when it has nothing left to ask."""
    try:
        teachers = [a_teacher(base_url, name) for name in TEACHERS]
        options = {"samples": SAMPLES, "concurrency": CONCURRENCY, "max_usd": max_usd}
        with Journal(path) as journal:
            asyncio.run(replay(states, teachers, journal, **options))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def snapshot(path: Path) -> dict[str, tuple[str, float]]:
    """The journal as a kill has left it, read from a copy: by key its status and USD."""
    with tempfile.TemporaryDirectory() as folder:
        for file in path.parent.glob(f"{path.name}*"):
            shutil.copy(file, folder)
        with closing(sqlite3.connect(Path(folder, path.name))) as copy:
            if not copy.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                return {}  # killed before the file was made
            rows = copy.execute("SELECT idempotency_key, status, usd + earlier_usd FROM answers").fetchall()
    found = {key: (status, usd) for key, status, usd in rows}
    assert len(found) == len(rows), "two rows have the same key"
    return found


def main(path: Path, kills: int, max_usd: float) -> dict[str, Any]:
    """Kill, check, and go on until everything is asked, or nothing more within the budget."""
    draw = random.Random(kills)
    pipe, of_server = Pipe()
    given = RawValue("l", 0)  # in memory that both processes share
    if not (server := os.fork()):
        pipe.close()  # the other end is then the last one, and this process ends with that one
        serve(of_server, given)
        os._exit(0)
    of_server.close()
    base_url = pipe.recv()
    # What a first request imports and reads is inherited by each life.
    warm = replayed(path.with_name("warm"), [a_state(-1)], [a_teacher(base_url)])
    assert warm.answered == threading.active_count() == 1
    pipe.send("counts")
    warm_keys = pipe.recv()[0].keys()
    killed, before, journal = 0, dict[str, int](), dict[str, tuple[str, float]]()
    while True:
        states = states_of(len(before))
        if not (child := os.fork()):
            live(path, base_url, states, max_usd)
        if is_killed := killed < kills:
            ended, last = False, given.value + draw.randint(0, MOST_ANSWERS)
            while given.value < last and not ended:
                time.sleep(0.001)
                ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            time.sleep(draw.uniform(0, SECONDS))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"the replaying process ended with {status}"
        killed += status == -signal.SIGKILL
        earlier, journal = journal, snapshot(path) if path.exists() else {}
        pipe.send("counts")
        asked, billed = ({k: n for k, n in one.items() if k not in warm_keys} for one in pipe.recv())
        # A row is committed before its request is sent.
        assert asked.keys() <= journal.keys(), "the server has a request that is not in the journal"
        # An answer is committed as it arrives: only those in flight may be lost.
        lost = [key for key in billed if journal[key][0] != "answered"]
        assert len(lost) <= CONCURRENCY, f"{len(lost)} answers are not in the journal"
        # An answer in the journal is not asked for again.
        again = [key for key, count in before.items() if asked[key] != count]
        assert not again, f"{len(again)} answers were asked for again"
        before = {key: asked[key] for key, (status, _) in journal.items() if status == "answered"}
        spent = sum(usd for _, usd in journal.values())
        usd = sum(map(usd_of, billed.values()))
        assert usd - 1e-9 <= spent <= max_usd + 1e-9, f"billed {usd}, counted {spent}, budget {max_usd}"
        if status == 0 and (not is_killed or journal == earlier):  # no budget for one more
            break
    pipe.send("")
    os.waitpid(server, 0)
    with Journal(path) as finished:
        answers = [*finished.answers()]
    for answer in answers:  # each answer is in the row of its own state and teacher
        (call,) = answer.message["tool_calls"]
        said = json.loads(call["function"]["arguments"])["command"]
        assert said.startswith(f"{answer.teacher}: "), said
    return {
        "kills": killed,
        "wanted": len(states) * len(TEACHERS) * SAMPLES,
        "answered": len(answers),
        "billed": len(billed),
        "requests": sum(asked.values()),
        "spent_usd": spent,
        "billed_usd": usd,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]) / "j", int(sys.argv[2]), float(sys.argv[3]))))
