"""The journal of a replay: every request and its answer, in one SQLite file.

A row is committed before its request is sent, and again as soon as its answer has arrived. A process that is
killed, or a machine that loses power, therefore loses at most the answers of the requests in flight. Their
rows are then still marked "sent". They are sent again with the same Idempotency-Key, and what they may have
cost counts as spent.

One process at a time has the journal open.
"""

import json
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.trace_replay.states import Message, canonical
from composer_plugins.recipes.trace_replay.teachers import Teacher

FILE = "answers.sqlite"
APPLICATION, FORMAT = 0x74527031, 1  # in the file's header: whose SQLite file it is, and its layout
Row = tuple[str, str, int]  # state, teacher and sample
SCORE = -1  # the `sample` of a request that scores an action, and asks for none

CREATE = """
CREATE TABLE answers (
  state TEXT NOT NULL,
  teacher TEXT NOT NULL,
  sample INTEGER NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('sent', 'answered', 'failed')),
  idempotency_key TEXT NOT NULL,
  usd REAL NOT NULL,           -- of the last request; of one in flight, the most that it can cost
  earlier_usd REAL NOT NULL,   -- of earlier requests for the same answer, which brought none
  finish_reason TEXT,
  prompt_tokens INTEGER,
  completion_tokens INTEGER,
  error TEXT,
  message TEXT,                -- JSON
  logprobs TEXT,               -- JSON
  PRIMARY KEY (state, teacher, sample)
) WITHOUT ROWID;
CREATE TABLE teachers (name TEXT PRIMARY KEY, asked TEXT NOT NULL, is_current INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class Answer:
    """A teacher's answer to a state."""

    state: str
    teacher: str
    sample: int
    message: Message  # in the form of State.observed
    finish_reason: str  # "stop", "tool_calls", "length" (cut off at the limit of tokens) ...
    usd: float


@dataclass(frozen=True)
class Score:
    """A teacher's log-probabilities of an action, given the state before it."""

    state: str  # the id of the state behind the action: `logprobs.scored_id`
    teacher: str
    token_ids: list[int]  # of the state and the action, as the teacher's chat template renders them
    logprobs: list[float]  # one for each token, in nats; 0.0 for the first, which has none
    start: int  # the position of the action's first token


class Journal(AbstractContextManager["Journal"]):
    """The journal at `path`, which is created if there is none."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.exists():
            raise ConfigError(str(self.path), "there is no journal", "run the command `replay` first")
        try:
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        except sqlite3.Error as error:
            raise self._explained(error) from None
        with ExitStack() as on_error:
            on_error.callback(self._connection.close)
            self._open()
            on_error.pop_all()

    def _open(self) -> None:
        # The lock is taken by the first transaction and held until the file is closed.
        self._rows("PRAGMA locking_mode = EXCLUSIVE")
        self._rows("PRAGMA synchronous = FULL")
        self._rows("BEGIN EXCLUSIVE")
        if not self._number("SELECT count(*) FROM sqlite_schema"):
            for statement in CREATE.split(";\n"):
                self._rows(statement)
            self._rows(f"PRAGMA application_id = {APPLICATION}")
            self._rows(f"PRAGMA user_version = {FORMAT}")
        if self._number("PRAGMA application_id") != APPLICATION:
            raise self._foreign()
        if (written := self._number("PRAGMA user_version")) != FORMAT:
            problem = f"the journal has format {written}, and this version reads {FORMAT}"
            raise DataError(
                str(self.path), problem, "install the version that wrote it, or name another folder"
            )
        self._rows("COMMIT")
        self._rows("PRAGMA journal_mode = WAL")
        self._spent = float(self._number("SELECT total(usd + earlier_usd) FROM answers"))
        self.interrupted = int(self._number("SELECT count(*) FROM answers WHERE status = 'sent'"))

    def close(self) -> None:
        """Close the file, so that another process can open it."""
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # What was asked

    def answered(self) -> set[Row]:
        """State, teacher and sample of every answer."""
        return set(self._rows("SELECT state, teacher, sample FROM answers WHERE status = 'answered'"))

    def teachers(self) -> list[str]:
        """The names of the teachers that the last replay was to ask, also of those without an answer."""
        query = "SELECT name FROM teachers WHERE is_current ORDER BY 1"
        return [name for (name,) in self._rows(query)]

    def answers(self) -> Iterator[Answer]:
        """Every answer, in the order of states, teachers and samples."""
        columns = "state, teacher, sample, message, finish_reason, usd"
        where = f"status = 'answered' AND sample > {SCORE}"
        for state, teacher, sample, message, finish, usd in self._rows(
            f"SELECT {columns} FROM answers WHERE {where} ORDER BY state, teacher, sample"
        ):
            yield Answer(state, teacher, sample, json.loads(message), finish, usd)

    def scores(self) -> Iterator[Score]:
        """Every action's log-probabilities."""
        where = f"status = 'answered' AND sample = {SCORE}"
        for state, teacher, value in self._rows(
            f"SELECT state, teacher, logprobs FROM answers WHERE {where} ORDER BY state, teacher"
        ):
            yield Score(state, teacher, **json.loads(value))

    def failures(self) -> list[str]:
        """Why requests brought no answer, those in flight when a process ended not among them."""
        return [error for (error,) in self._rows("SELECT error FROM answers WHERE status = 'failed'")]

    def spent(self) -> float:
        """USD of all requests. One in flight, and one of unknown cost, count with the most they can cost."""
        return self._spent

    # What is asked now

    def check_teachers(self, teachers: Sequence[Teacher]) -> None:
        """Record the teachers of this replay.

        Raises ConfigError if this journal has answers of another model under the name of one of them.
        """
        has_answers = "SELECT teacher FROM answers WHERE status != 'failed'"
        known = dict(self._rows(f"SELECT name, asked FROM teachers WHERE name IN ({has_answers})"))
        now = {
            teacher.name: canonical({"model": teacher.model, **teacher.limit(), "params": teacher.params})
            for teacher in teachers
        }
        for teacher in teachers:
            if known.get(teacher.name, now[teacher.name]) != now[teacher.name]:
                problem = f"{self.path} has its answers to other requests: {known[teacher.name]}"
                remedy = "give the changed teacher another name, or name another folder"
                raise ConfigError(f"teacher {teacher.name!r}", problem, remedy)
        self._rows("UPDATE teachers SET is_current = 0")
        for name, asked in now.items():
            self._rows("INSERT OR REPLACE INTO teachers VALUES (?, ?, 1)", (name, asked))

    def mark(self, row: Row, usd: float) -> str:
        """Record that a request is being sent, and the most that it can cost; return its Idempotency-Key.

        A key is used again until the endpoint has answered it.
        """
        rows = self._rows(
            "INSERT INTO answers (state, teacher, sample, status, idempotency_key, usd, earlier_usd) "
            "VALUES (?, ?, ?, 'sent', ?, ?, 0) ON CONFLICT DO UPDATE "
            "SET status = 'sent', earlier_usd = earlier_usd + usd, usd = excluded.usd "
            "RETURNING idempotency_key",
            (*row, uuid.uuid4().hex, usd),
        )
        self._spent += usd
        key: str = rows[0][0]
        return key

    def answer(
        self,
        row: Row,
        *,
        usd: float,
        message: Message | None = None,
        finish_reason: str = "",
        logprobs: dict[str, Any] | None = None,
        **tokens: int,
    ) -> None:
        """Record the answer of a request that was marked, with its prompt_tokens and completion_tokens."""
        texts = {"message": message, "logprobs": logprobs}
        values = {"status": "answered", "usd": usd, "finish_reason": finish_reason, "error": None, **tokens}
        values |= {name: json.dumps(value) for name, value in texts.items() if value is not None}
        self._update(row, values)

    def fail(self, row: Row, *, usd: float, error: str, was_answered: bool) -> None:
        """Record why a request brought no answer, and what counts as spent for it.

        `was_answered` says that the endpoint answered, so that the next request needs another key.
        """
        values: dict[str, Any] = {"status": "failed", "usd": usd, "error": error}
        values |= {"idempotency_key": uuid.uuid4().hex} if was_answered else {}
        self._update(row, values)

    def _update(self, row: Row, values: dict[str, Any]) -> None:
        where = "WHERE state = ? AND teacher = ? AND sample = ? AND status = 'sent'"
        ((reserved,),) = self._rows(f"SELECT usd FROM answers {where}", row)
        columns = ", ".join(f"{name} = ?" for name in values)
        self._rows(f"UPDATE answers SET {columns} {where}", (*values.values(), *row))
        self._spent += values["usd"] - reserved

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Run one statement, which is a transaction of its own, and return its rows."""
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._explained(error) from None

    def _number(self, query: str) -> float:
        number: float = self._rows(query)[0][0]
        return number

    def _foreign(self) -> DataError:
        return DataError(str(self.path), "this file is not a journal of this recipe", "name another folder")

    def _explained(self, error: sqlite3.Error) -> ConfigError | DataError:
        """SQLite's error as one of ours."""
        key, code = str(self.path), getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            return ConfigError(key, "another process has this journal open", "wait until it has ended")
        if code == sqlite3.SQLITE_NOTADB:
            return self._foreign()
        if code == sqlite3.SQLITE_CORRUPT:
            return DataError(
                key, f"the journal is damaged ({error})", "restore it from a copy, or begin anew"
            )
        problem = f"the journal cannot be opened or written ({error})"
        return ConfigError(key, problem, "name a folder that this process can write to, on a disk with space")
