"""A store of per-token numbers by token ids: a teacher's log-probabilities, or the coefficients of pairs.

PRIME-RL's loss sees no token ids. Numbers that belong to a completion are therefore looked up before its
samples leave the orchestrator or the environment:

    with StoreWriter("pairs.store") as writer:
        writer.put(token_ids, values, "reference")
    Store("pairs.store").get(token_ids, "reference")

A store is one SQLite file with a write-ahead log. `flush` commits: a process that is killed, or a machine
that loses power, loses only what was not flushed. Any number of processes read while one writes, and writers
take turns. All of them must run on one machine, because they share the log's index as memory. For several
machines write on one, close the writer, and copy the file to the others, or let them read it while nobody
writes. If a writer was killed, its log (`-wal`) is beside the file: open the store once before you copy it.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, Self, get_args
from urllib.parse import quote

import numpy as np

from composer_plugins.adapters.prime_rl_plugin.values import Array, numbers, reference_values
from composer_plugins.errors import ConfigError, DataError, unknown

Kind = Literal["reference", "replay"]
KINDS: tuple[Kind, ...] = get_args(Kind)

KEY_BYTES = 16
APPLICATION, FORMAT = 0x436F6D70, 1  # in the file's header: whose SQLite file it is, and its layout
PAGE = 4096  # bytes: SQLite's default
HEADER = b"SQLite format 3\0"  # what every SQLite file begins with
TIMEOUT = 60.0  # seconds that a writer waits for another one's transaction

CREATE = "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, numbers BLOB NOT NULL)"
RESTORE = "restore it from a copy, or write it again"
WRITE = (
    "INSERT INTO records VALUES (?, ?) "
    "ON CONFLICT (key) DO UPDATE SET numbers = excluded.numbers WHERE numbers IS NOT excluded.numbers"
)


class Store:
    """The committed records of the file `path`, read anew at every call.

    The file is open only while it is read, so a store may be replaced at its path, and a process may fork. In
    a folder that this process cannot write to, a store is readable unless a writer was killed there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        len(self)  # raises now if something is wrong with the file

    def get(self, token_ids: Sequence[int], kind: Kind) -> Array | None:
        """The float32 values that were put last for exactly these tokens, one each, or None."""
        key = _key(token_ids, kind)
        with _opened(self.path) as connection:
            row = connection.execute("SELECT numbers FROM records WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        if len(row[0]) != 4 * len(token_ids):
            problem = f"a record of {len(token_ids)} tokens has {len(row[0])} bytes"
            raise DataError(str(self.path), problem, RESTORE)
        return np.frombuffer(row[0], dtype="<f4").astype(np.float32)

    def __len__(self) -> int:
        with _opened(self.path) as connection:
            count: int = connection.execute("SELECT count(*) FROM records").fetchone()[0]
        return count


class StoreWriter(Store):
    """Adds records to the store `path`, and creates the file if there is none.

    `put` collects and `flush` commits: flush some thousand records at a time. Another process may write too,
    and waits for its turn. After a fork, what the parent has put but not flushed stays with the parent.
    """

    def __init__(self, path: str | Path) -> None:
        self._pending: dict[bytes, bytes] = {}
        self._process, self._is_closed = os.getpid(), False
        _create(Path(path).absolute())
        super().__init__(path)

    def put(self, token_ids: Sequence[int], values: Sequence[float] | Array, kind: Kind) -> None:
        """Collect the values of these tokens, one each. A token that was not sampled takes any number.

        "reference": log-probabilities, nats. "replay": signed coefficients (`stamps.dpo_coefficient`).
        """
        key, pending = _key(token_ids, kind), self._own_pending()
        checked = (reference_values if kind == "reference" else numbers)(values, len(token_ids), kind)
        stored = checked.astype("<f4")
        if not stored.any():
            raise DataError(kind, "it is 0 throughout in float32", "pass numbers in its range")
        pending[key] = stored.tobytes()

    def flush(self) -> None:
        """Commit what was put: once this returns, neither a kill nor a power cut loses it."""
        if not (pending := self._own_pending()):
            return
        with _opened(self.path) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            with connection:  # commits, or rolls back
                connection.executemany(WRITE, pending.items())
        pending.clear()

    def close(self) -> None:
        """Flush. After this `put` and `flush` raise ConfigError."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_pending(self) -> dict[bytes, bytes]:
        """What this process has put, without what it inherited by a fork."""
        if self._is_closed:
            raise ConfigError(str(self.path), "this writer is closed", "open another StoreWriter")
        if self._process != os.getpid():
            self._process, self._pending = os.getpid(), {}
        return self._pending


def _key(token_ids: Sequence[int], kind: str) -> bytes:
    if kind not in KINDS:
        raise unknown("kind", str(kind), KINDS, noun="kind of record")
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or ids.size and ids.dtype.kind not in "iu":
        raise DataError("token_ids", f"{ids.dtype} of shape {ids.shape}", "pass one list of integers")
    if not ids.size:
        raise DataError("token_ids", "no token", "pass the ids of a whole branch")
    if (wrong := (ids < 0) | (ids > np.iinfo(np.int64).max)).any():
        raise DataError("token_ids", f"{ids[wrong][0]} is not a token id", "pass ids from 0 to 2**63 - 1")
    content = ids.astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=kind.encode()).digest()


def _create(path: Path) -> None:
    """Make `path` a store, unless it is one or something else already."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connected(path, "rwc")) as connection:
            is_empty = not _pragma(connection, "page_count")
            connection.execute("BEGIN IMMEDIATE")  # fails here and not at the first flush, if it must
            if is_empty:
                connection.execute(CREATE)
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                connection.execute(f"PRAGMA user_version = {FORMAT}")
            _check(connection, path)
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The store, open for as long as it is used: a connection would not survive a fork."""
    with _explained(path), closing(_connected(path, "rw")) as connection:
        has_log, size = _size(path.with_name(path.name + "-wal")) > 0, path.stat().st_size
        if size % PAGE and not has_log:  # SQLite would read 0 for the rest of the last page
            with path.open("rb") as file:
                begin = file.read(len(HEADER))
            if not HEADER.startswith(begin):
                raise _foreign(path)
            raise DataError(str(path), f"is cut off after {size} bytes", RESTORE)
        try:
            _check(connection, path)
        except sqlite3.OperationalError:
            if has_log or os.access(path.parent, os.W_OK):
                raise
        else:
            yield connection
            return
    # No log can be written in this folder, and there is none to read.
    with _explained(path), closing(_connected(path, "ro", "&immutable=1")) as connection:
        _check(connection, path)
        yield connection


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none, or if its writer removes it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _connected(path: Path, mode: str, more: str = "") -> sqlite3.Connection:
    if "\0" in str(path):  # SQLite would open the file whose name ends there
        raise ConfigError(repr(str(path)), "it has a NUL character", "give the name of a file")
    name = f"file:{quote(os.fsencode(path))}?mode={mode}{more}"
    return sqlite3.connect(name, uri=True, timeout=TIMEOUT, isolation_level=None)


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    value: int = connection.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def _foreign(path: Path) -> DataError:
    return DataError(str(path), "is not a store of composer-plugins", "name another file")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise DataError unless this SQLite file is a store of this format."""
    # Asked first: a writer that creates the file commits its first page with all that follows.
    if not _pragma(connection, "page_count"):
        raise DataError(str(path), "is an empty file", "write the store with StoreWriter")
    if _pragma(connection, "application_id") != APPLICATION:
        raise _foreign(path)
    if (written := _pragma(connection, "user_version")) != FORMAT:
        problem = f"has format {written}, and this version reads {FORMAT}"
        raise DataError(str(path), problem, "install the version that wrote it")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the operating system's and SQLite's errors into ours."""
    key, remedy = str(path), "give a file in a folder that this process can use"
    try:
        yield
    except OSError as error:
        raise ConfigError(key, f"cannot be opened: {error.strerror or error}", remedy) from None
    except sqlite3.Error as error:
        code = error.sqlite_errorcode & 0xFF
        if code == sqlite3.SQLITE_NOTADB:
            raise _foreign(path) from None
        if code == sqlite3.SQLITE_CORRUPT:
            raise DataError(key, f"is not a whole store ({error})", RESTORE) from None
        if code == sqlite3.SQLITE_ERROR and "no such table" in str(error):
            raise DataError(key, f"is not a whole store ({error})", RESTORE) from None
        if code == sqlite3.SQLITE_CANTOPEN:
            try:
                path.stat()
            except FileNotFoundError:
                raise ConfigError(key, "there is no store", "write one with StoreWriter") from None
            except OSError as failure:
                raise ConfigError(key, f"cannot be opened: {failure.strerror}", remedy) from None
        if code == sqlite3.SQLITE_BUSY:
            problem = f"another process has been writing for more than {TIMEOUT:g} seconds"
            raise ConfigError(key, problem, "let one process write, or write several stores") from None
        raise ConfigError(key, f"cannot be read or written ({error})", remedy) from None
