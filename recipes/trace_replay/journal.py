"""The journal of a replay: a line of JSON for each request that has ended, with its answer or with an error.

A line is on the disk before the next request is sent in its place. A process that is killed, or a machine
that loses power, therefore loses at most the answers of the requests in flight. Half of a last line is cut
off when the journal is opened again. A line that could not be written whole is cut off at once.
"""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, TypeAdapter

from composer_plugins.errors import ConfigError, DataError, writing
from composer_plugins.recipes.trace_replay.states import Message

FILE = "answers.jsonl"
Row = tuple[str, str, int]  # state, teacher and sample
SCORE = -1  # the `sample` of a request that scores an action, and asks for none


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


class _Function(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    function: _Function


class _Message(BaseModel):
    content: str
    tool_calls: list[_Call] = []


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Tokens(_Exact):
    token_ids: list[int]
    logprobs: list[float]
    start: int


class _Line(_Exact):
    state: str
    teacher: str
    sample: int
    usd: NonNegativeFloat


class _AnswerLine(_Line):
    message: _Message
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ScoreLine(_Line):
    score: _Tokens


class _ErrorLine(_Line):
    error: str


LINE = TypeAdapter[Any](_AnswerLine | _ScoreLine | _ErrorLine)


class Journal(AbstractContextManager["Journal"]):
    """The journal at `path`, which is created if there is none. One process at a time has it open."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        if not create and not path.exists():
            raise ConfigError(str(path), "there is no journal", "run the command `replay` first")
        with writing(str(path), path):
            self._file = path.open("a+b", buffering=0)
        try:
            self._open()
        except (ConfigError, DataError):
            self._file.close()
            raise

    def _open(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "another process has this journal open"
            raise ConfigError(str(self.path), problem, "wait until it has ended") from None
        self._file.seek(0)
        *lines, half = self._file.read().split(b"\n")
        self._entries = [self._entry(number, line) for number, line in enumerate(lines, start=1)]
        self.has_half_line = bool(half)
        self._file.truncate(self._file.tell() - len(half))
        self.spent = sum(entry["usd"] for entry in self._entries)  # USD of all requests
        self.failed = Counter(_row(entry) for entry in self._entries if "error" in entry)

    def _entry(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = json.loads(line)
            LINE.validate_python(entry, strict=True)
        except (ValueError, RecursionError):
            problem = "the line is not one of a journal of this recipe"
            raise DataError(f"{self.path}:{number}", problem, "remove it, or name another folder") from None
        return entry

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row, *, usd: float, **result: Any) -> None:
        """Write how a request ended: `message` and `finish_reason`, or `score`, or `error`."""
        state, teacher, sample = row
        entry = {"state": state, "teacher": teacher, "sample": sample, "usd": usd, **result}
        end, rest = self._file.seek(0, os.SEEK_END), json.dumps(entry).encode() + b"\n"
        with writing(str(self.path), self.path):
            try:
                while rest:  # the system may write less than it is given
                    rest = rest[self._file.write(rest) :]
                os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # what cannot be truncated either: a device
                    self._file.truncate(end)
                raise
        self._entries.append(entry)
        self.spent += usd
        self.failed[row] += "error" in result

    def answered(self) -> set[Row]:
        """State, teacher and sample of every answer."""
        return {_row(entry) for entry in self._entries if "error" not in entry}

    def teachers(self) -> list[str]:
        """The names of the teachers that were asked, also of those without an answer."""
        return sorted({entry["teacher"] for entry in self._entries})

    def answers(self) -> Iterator[Answer]:
        """Every answer, in the order of states, teachers and samples."""
        for entry in sorted(self._entries, key=_row):
            if "message" in entry:
                yield Answer(*_row(entry), entry["message"], entry["finish_reason"], entry["usd"])

    def scores(self) -> Iterator[Score]:
        """Every action's log-probabilities."""
        for entry in self._entries:
            if "score" in entry:
                yield Score(entry["state"], entry["teacher"], **entry["score"])

    def failures(self) -> list[str]:
        """Why the requests that have no answer yet brought none the last time."""
        errors = {_row(entry): entry["error"] for entry in self._entries if "error" in entry}
        answered = self.answered()
        return [error for row, error in errors.items() if row not in answered]


def _row(entry: dict[str, Any]) -> Row:
    return entry["state"], entry["teacher"], entry["sample"]
