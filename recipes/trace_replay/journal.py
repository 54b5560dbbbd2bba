"""The journal of a replay: a line of JSON for each request that has ended, with its answer or with an error.

A line is on the disk before the next request is sent in its place. A process that is killed, or a machine
that loses power, therefore loses at most the answers of the requests in flight. Half of a last line is cut
off when the journal is opened again.
"""

import fcntl
import json
import os
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, NonNegativeFloat, TypeAdapter

from composer_plugins.errors import ConfigError, DataError, writing
from composer_plugins.recipes.trace_replay.formats.common import without_lone_surrogates
from composer_plugins.recipes.trace_replay.states import Message

FILE = "answers.jsonl"
Row = tuple[str, str, int]  # state, teacher and sample


@dataclass(frozen=True)
class _Line:
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    state: str
    teacher: str
    sample: int
    usd: NonNegativeFloat

    @property
    def row(self) -> Row:
        """State, teacher and sample."""
        return self.state, self.teacher, self.sample


@dataclass(frozen=True)
class Answer(_Line):
    """A teacher's answer to a state."""

    message: Message  # in the form of State.observed
    finish_reason: str  # "stop", "tool_calls", "length" (cut off at the limit of tokens) ...
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Failure(_Line):
    """Why a request brought no usable answer."""

    error: str


LINE = TypeAdapter[Answer | Failure](Answer | Failure)


class Journal(AbstractContextManager["Journal"]):
    """The journal at `path`, which is created if there is none. One process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        self.spent = sum(entry.usd for entry in self._entries)  # USD of all requests

    def _entry(self, number: int, line: bytes) -> Answer | Failure:
        try:
            return LINE.validate_json(line)
        except ValueError:
            problem = "the line is not one of a journal of this recipe"
            raise DataError(f"{self.path}:{number}", problem, "remove it, or name another folder") from None

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, entry: Answer | Failure) -> None:
        """Write how a request ended, after a check that the line can be read again."""
        line = without_lone_surrogates(json.dumps(vars(entry), ensure_ascii=False)).encode()
        entry = LINE.validate_json(line)
        rest = line + b"\n"
        with writing(str(self.path), self.path):
            while rest:  # the system may write less than it is given
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        self._entries.append(entry)
        self.spent += entry.usd

    def answers(self) -> list[Answer]:
        """Every answer, in the order of states, teachers and samples."""
        return sorted((one for one in self._entries if isinstance(one, Answer)), key=lambda one: one.row)

    def failed(self) -> Counter[Row]:
        """How often each request has failed."""
        return Counter(entry.row for entry in self._entries if isinstance(entry, Failure))

    def failures(self) -> list[str]:
        """Why the requests that have no answer yet brought none the last time."""
        last = {entry.row: entry for entry in self._entries}  # an answered row is not asked again
        return [entry.error for entry in last.values() if isinstance(entry, Failure)]
