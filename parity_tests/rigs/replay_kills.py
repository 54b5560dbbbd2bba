"""Kill a replaying process at random moments, and check its journal after each kill."""

import json
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay.journal import Journal
from parity_tests.rigs.forked import ended, processes
from parity_tests.rigs.replayed import a_state, a_teacher, echo, replayed, usd_of
from parity_tests.rigs.scripted_faults import FaultyTeachers

CONCURRENCY, SAMPLES, TEACHERS = 4, 2, "ab"
MOST_ANSWERS = 5  # that the server gives during a life which ends in a kill
SECONDS = 0.02  # the most that such a life goes on after them


def live(path: Path, base_url: str, states: int, max_usd: float) -> None:
    """One life of the replaying process. It ends with status 0 when it has nothing left to ask."""
    teachers = [a_teacher(base_url, name) for name in TEACHERS]
    options = {"samples": SAMPLES, "concurrency": CONCURRENCY, "max_usd": max_usd}
    replayed(path, [a_state(i) for i in range(states)], teachers, **options)


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


def kill_at_random(path: Path, kills: int, max_usd: float) -> dict[str, Any]:
    """Kill, check, and go on until everything is asked, or nothing more within the budget."""
    draw = random.Random(kills)
    killed, before, journal = 0, dict[str, int](), dict[str, tuple[str, float]]()
    with FaultyTeachers(echo, delay=0.002) as server, processes(live) as start:
        while True:
            # Some states more than those that have all their answers.
            states = 20 + len(before) // (SAMPLES * len(TEACHERS))
            child = start(path, server.base_url, states, max_usd)
            if is_killed := killed < kills:
                last = len(server.billed) + draw.randint(0, MOST_ANSWERS)
                while len(server.billed) < last and child.is_alive():
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, SECONDS))
                child.kill()
            status = ended(child)
            child.close()
            assert status in (0, -signal.SIGKILL), f"the replaying process ended with {status}"
            killed += status == -signal.SIGKILL
            earlier, journal = journal, snapshot(path) if path.exists() else {}
            with server.lock:
                asked, billed = dict(server.asked), dict(server.billed)
            # A row is committed before its request is sent.
            assert asked.keys() <= journal.keys(), "the server has a request that is not in the journal"
            # An answer is committed as it arrives: only those in flight may be lost.
            lost = [key for key in billed if journal[key][0] != "answered"]
            assert len(lost) <= CONCURRENCY, f"{len(lost)} answers are not in the journal"
            # An answer in the journal is not asked for again.
            again = [key for key, count in before.items() if asked[key] != count]
            assert not again, f"{len(again)} answers were asked for again"
            before = {key: asked[key] for key, (status_, _) in journal.items() if status_ == "answered"}
            spent = sum(usd for _, usd in journal.values())
            usd = sum(map(usd_of, billed.values()))
            assert usd - 1e-9 <= spent <= max_usd + 1e-9, f"billed {usd}, counted {spent}, budget {max_usd}"
            if status == 0 and (not is_killed or journal == earlier):  # no budget for one more
                break
    with Journal(path) as finished:
        answers = [*finished.answers()]
    for answer in answers:  # each answer is in the row of its own state and teacher
        (call,) = answer.message["tool_calls"]
        said = json.loads(call["function"]["arguments"])["command"]
        assert said.startswith(f"{answer.teacher}: "), said
    return {
        "kills": killed,
        "wanted": states * len(TEACHERS) * SAMPLES,
        "answered": len(answers),
        "billed": len(billed),
        "requests": sum(asked.values()),
        "spent_usd": spent,
        "billed_usd": usd,
    }
