"""A store of per-token numbers by token ids: a teacher's log-probabilities, or the coefficients of pairs.

PRIME-RL's loss sees no token ids. Numbers that belong to a completion are therefore looked up before its
samples leave the orchestrator or the environment:

    with StoreWriter("pairs.store") as writer:
        writer.put(token_ids, values, "reference")
    Store("pairs.store").get(token_ids, "reference")

A store is one SQLite file, which every call opens anew. Processes on one machine may read and write it.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np

from composer_plugins.adapters.prime_rl_plugin.values import Array, numbers, reference_values
from composer_plugins.errors import ConfigError, DataError, unknown

Kind = Literal["reference", "replay"]

TIMEOUT = 60.0  # seconds that a process waits for another one's transaction
CREATE = "CREATE TABLE IF NOT EXISTS records (key BLOB PRIMARY KEY, numbers BLOB NOT NULL)"


class Store:
    """The committed records of the file `path`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if not self.path.is_file():
            raise ConfigError(str(path), "there is no store", "write one with StoreWriter")

    def get(self, token_ids: Sequence[int], kind: Kind) -> Array | None:
        """The float32 values that were put last for exactly these tokens, one each, or None."""
        with opened(self.path) as connection:
            given = (key(token_ids, kind),)
            row = connection.execute("SELECT numbers FROM records WHERE key = ?", given).fetchone()
        return None if row is None else np.frombuffer(row[0], dtype="<f4").astype(np.float32)


class StoreWriter:
    """Adds records to the store `path`, and creates the file if there is none.

    `put` collects, and `flush` and the end of a `with` block commit: flush some thousand records at a time.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.pending = Path(path).absolute(), dict[bytes, bytes]()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with opened(self.path) as connection:
            connection.execute(CREATE)

    def put(self, token_ids: Sequence[int], values: Sequence[float] | Array, kind: Kind) -> None:
        """Collect the values of these tokens, one each. A token that was not sampled takes any number.

        "reference": log-probabilities, nats. "replay": signed coefficients (`stamps.dpo_coefficient`).
        """
        checked = (reference_values if kind == "reference" else numbers)(values, len(token_ids), kind)
        self.pending[key(token_ids, kind)] = checked.astype("<f4").tobytes()

    def flush(self) -> None:
        """Commit what was put."""
        with opened(self.path) as connection:
            connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", self.pending.items())
        self.pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def key(token_ids: Sequence[int], kind: Kind) -> bytes:
    """The key of a record: a digest of the token ids and the kind."""
    if kind not in get_args(Kind):
        raise unknown("kind", str(kind), get_args(Kind), noun="kind of record")
    given = np.asarray(token_ids)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise DataError("token_ids", f"{given.dtype} of shape {given.shape}", "pass one list of integers")
    ids = given.astype("<i8")  # from 2**63 on they become negative
    if (wrong := ids < 0).any():
        raise DataError("token_ids", f"{given[wrong][0]} is not a token id", "pass ids from 0 to 2**63 - 1")
    return hashlib.blake2b(ids.tobytes(), digest_size=16, person=kind.encode()).digest()


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to the file, and commit at the end; SQLite's errors are DataErrors."""
    try:
        with closing(sqlite3.connect(path, timeout=TIMEOUT)) as connection, connection:
            yield connection
    except sqlite3.Error as error:
        remedy = "name a file that StoreWriter has written, in a folder that this process can use"
        raise DataError(str(path), f"it cannot be read or written as a store ({error})", remedy) from None
