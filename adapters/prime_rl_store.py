"""Numbers per token that outlive a run: a teacher's log-probabilities, or a pair's coefficients.

PRIME-RL's loss sees no token ids, so that what belongs to a completion has to be looked up before the
samples leave the orchestrator or the environment. There the ids are the key:

    with StoreWriter("pairs.store") as writer:
        writer.put(token_ids, values, "reference")
    Store("pairs.store").get(token_ids, "reference")

A store is a folder of files that are never changed, one per `flush`. A process that is killed loses what
it had not flushed, and nothing else. Readers need no lock, and see a flush after the next `refresh`.
"""

import fcntl
import hashlib
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np

from composer_plugins.adapters.prime_rl_parts import segments
from composer_plugins.adapters.prime_rl_parts.values import Array, numbers, of_kind, reference_values
from composer_plugins.errors import ConfigError, DataError, unknown

Kind = Literal["reference", "replay"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_COMMITTED = re.compile(rf"\d+{re.escape(segments.SUFFIX)}")


class Store:
    """The committed records of the folder `path`, to be read by any number of processes.

    Of a key that was flushed twice with different values, the last one counts. A committed file that
    cannot be read, which a copy may have cut off, is left out with a warning, and tried again at each
    `refresh`. A store that was deleted and built anew at its path is read anew.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, int] = {}  # the inode of each, which no other has while it is mapped
        self._segments: dict[str, segments.Segment] = {}
        self._warned: dict[str, str] = {}
        self._records: dict[bytes, tuple[segments.Segment, int, int]] = {}
        self.refresh()

    def refresh(self) -> None:
        """See what has been flushed since."""
        before, self._files = self._files, self._listed()
        if any(self._files.get(name) != before[name] for name in self._segments):
            self._segments.clear()
            self._records.clear()
        for name in sorted(self._files.keys() - self._segments.keys()):
            self._open(name)

    def get(self, token_ids: Sequence[int], kind: Kind) -> Array | None:
        """The float32 values that were put for exactly these tokens, one each, or None."""
        found = self._records.get(_key(token_ids, kind))
        if found is None:
            return None
        segment, start, end = found
        return segment.read(start, end)

    def __len__(self) -> int:
        return len(self._records)

    def _listed(self) -> dict[str, int]:
        try:
            with os.scandir(self.path) as entries:
                return {one.name: one.inode() for one in entries if _COMMITTED.fullmatch(one.name)}
        except FileNotFoundError:
            raise ConfigError(f"no store at {self.path.absolute()}: a StoreWriter makes one") from None
        except OSError as error:
            raise _inaccessible(self.path, error) from None

    def _open(self, name: str) -> None:
        try:
            segment = segments.Segment(self.path / name)
        except DataError as error:
            if self._warned.get(name) != str(error):
                warnings.warn(f"left out: {error}", stacklevel=3)
            self._warned[name] = str(error)
            return
        self._warned.pop(name, None)
        self._segments[name] = segment
        for key, span in segment.spans():
            older = self._records.get(key)
            if older is None or older[0].name <= name:
                self._records[key] = (segment, *span)


class StoreWriter(Store):
    """The one process that adds to the store `path`, which it makes where there is none.

    `put` collects and `flush` commits: flush some thousand records at a time, for each flush is a file.
    A file that a killed writer left unfinished is removed, with a warning that names it.
    """

    def __init__(self, path: str | Path) -> None:
        self._pending: dict[bytes, Array] = {}
        self._process = os.getpid()
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            self._lock = _locked(Path(path) / "lock")
        except OSError as error:
            raise _inaccessible(Path(path), error) from None
        try:
            for torn in sorted(Path(path).glob(f"*{segments.UNFINISHED}")):
                warnings.warn(f"dropped {torn}, which a writer did not live to finish", stacklevel=2)
                torn.unlink()
            super().__init__(path)
        except BaseException:
            self._unlock()
            raise

    def put(self, token_ids: Sequence[int], values: Sequence[float] | Array, kind: Kind) -> None:
        """Collect the values of these tokens, one each; at tokens the policy did not sample, any number.

        "reference": log-probabilities, nats. "replay": signed coefficients (`dpo_coefficient`).
        """
        self._check_open()
        key, what = _key(token_ids, kind), f"{kind} of {len(token_ids)} tokens"
        checked = (reference_values if kind == "reference" else numbers)(values, len(token_ids), what)
        with np.errstate(over="ignore"):
            stored = checked.astype(np.float32)
        if not (stored.any() and np.isfinite(stored).all()):
            raise DataError(f"{what}: nothing but 0 or an infinity is left of it in float32")
        self._pending[key] = stored

    def flush(self) -> None:
        """Commit what was put: once this returns, neither a kill nor a power cut loses it."""
        self._check_open()
        new = {key: values for key, values in self._pending.items() if not self._has(key, values)}
        if new:
            number = max((int(Path(name).stem) for name in self._files), default=-1) + 1
            segments.write(self.path / f"{number:08d}{segments.SUFFIX}", new)
            self.refresh()
        self._pending.clear()

    def close(self) -> None:
        """Flush, and let another writer in; of a forked process, neither."""
        if self._lock >= 0:
            try:
                if self._process == os.getpid():
                    self.flush()
            finally:
                self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._lock < 0:
            raise ConfigError(f"the writer of {self.path} is closed")
        if self._process != os.getpid():
            raise ConfigError(
                f"the writer of {self.path} was opened in process {self._process}, and this one is its fork: "
                "write there, or open another store here"
            )

    def _unlock(self) -> None:
        if self._process == os.getpid():
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing does not, where a fork has it open as well
        os.close(self._lock)
        self._lock = -1

    def _has(self, key: bytes, values: Array) -> bool:
        found = self._records.get(key)
        return found is not None and np.array_equal(found[0].read(*found[1:]), values)


def _key(token_ids: Sequence[int], kind: str) -> bytes:
    if kind not in KINDS:
        raise unknown("kind of record", kind, KINDS)
    ids = of_kind(token_ids, "iu", "token_ids: integers")
    if not ids.size:
        raise DataError("token_ids: integers wanted, not none")
    if (wrong := (ids < 0) | (ids > np.iinfo(np.int64).max)).any():
        raise DataError(f"token_ids: {ids[wrong][0]} is no token id, which is from 0 to 2**63 - 1")
    content = ids.astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=segments.KEY_BYTES, person=kind.encode()).digest()


def _inaccessible(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"no store can be kept at {path.absolute()}: {error.strerror or error}")


def _locked(path: Path) -> int:
    """The file `path`, locked until it is closed or this process ends."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode() or "unknown"
        os.close(lock)
        raise ConfigError(
            f"{path.parent} has a writer already, process {owner}: close it, or write another store"
        ) from None
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock
