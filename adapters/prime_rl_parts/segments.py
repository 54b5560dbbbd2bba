"""One file of a store: records that were committed together, as safetensors, memory-mapped when read.

    keys    uint8 [records, 16]     ends    int64 [records]     values  float32 [numbers]

Record i holds values[ends[i - 1] : ends[i]]. A file is written under another name, synced, then renamed:
under its own name it is whole, whenever the process or the machine died.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from composer_plugins.adapters.prime_rl_parts.values import Array
from composer_plugins.errors import ConfigError, DataError

KEY_BYTES = 16
FORMAT = "1"  # raised when the layout changes
SUFFIX, UNFINISHED = ".safetensors", ".tmp"


class Segment:
    """A committed file, of which only the keys are in memory."""

    def __init__(self, path: Path) -> None:
        library = _safetensors()
        try:
            path.open("rb").close()  # the library says "No such file" of one that it may not read
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        self.name = path.name
        try:
            self._file = library.safe_open(path, framework="np")
            written = (self._file.metadata() or {}).get("composer_plugins")
            if written == FORMAT:
                self._keys = self._file.get_tensor("keys").tobytes()
                self._ends = self._file.get_tensor("ends")
                self._values = self._file.get_slice("values")
        except (OSError, library.SafetensorError) as error:
            raise DataError(f"{path} is not a whole file of a store: {error}") from None
        if written != FORMAT:
            raise DataError(f"{path} has format {written!r}, and this version reads {FORMAT!r}")

    def spans(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        """Each record's key, and where its values begin and end."""
        start = 0
        for i, end in enumerate(self._ends.tolist()):
            yield self._keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], (start, end)
            start = end

    def read(self, start: int, end: int) -> Array:
        """A copy of values[start:end], from the mapped file."""
        values: Array = self._values[start:end]
        return values


def write(path: Path, records: Mapping[bytes, Array]) -> None:
    """Commit `records`, float32 arrays by key, as the file `path`."""
    ends = np.cumsum([len(values) for values in records.values()], dtype=np.int64)
    keys = np.frombuffer(b"".join(records), dtype=np.uint8).reshape(-1, KEY_BYTES)
    tensors = {"keys": keys, "ends": ends, "values": np.concatenate(list(records.values()))}
    content = _safetensors().numpy.save(tensors, metadata={"composer_plugins": FORMAT})
    unfinished = path.with_suffix(UNFINISHED)
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    _sync_folder(path.parent)  # or else the new name may be lost with the machine


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ConfigError(
            "the store is written with safetensors, which is not installed: "
            "pip install 'composer-plugins[prime-rl]'"
        ) from None
    return safetensors
