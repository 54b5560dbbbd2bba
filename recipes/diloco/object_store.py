"""A folder or a bucket of objects that never change: each is created once, as a whole, or not at all.

The replicas agree on a round by creating one object, so that two of them never create the same one matters.
Each kind of store has its own means, which `ObjectStore.create` uses:

folder    a temporary file is written and linked under the final name; link fails if the name exists
s3://     a put with If-None-Match: * (s3fs); of many gigabytes, the end of a multipart upload with it
gs://     an upload with ifGenerationMatch=0 (gcsfs)
memory:// a look and a put under a lock; for the threads of one process, in tests
"""

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from composer_plugins.errors import ComposerError, ConfigError, DataError, in_a_line

EXCLUSIVE = {"file", "local", "memory", "s3", "s3a", "gs", "gcs"}  # the protocols named above
FOLDERS = ("replicas", "commits", "deltas", "states")
MEMORY_LOCK = threading.Lock()


class ObjectStore:
    """A folder or a bucket by its URL, as fsspec writes it. Names are relative to it."""

    def __init__(self, url: str, owner: str = "") -> None:
        self.url, self.owner = url, owner  # the owner's temporary files begin with its name
        self.sent = 0  # bytes of whole objects
        protocol = fsspec.core.split_protocol(url)[0] or "file"
        remedy = "name a folder, or a URL of s3:// or gs://"
        if protocol not in EXCLUSIVE:
            problem = f"it is not known how an object of {url} is created exclusively"
            raise ConfigError("store", problem, remedy)
        try:
            self.files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except ImportError as error:  # s3fs or gcsfs is not installed
            raise ConfigError("store", f"{url} cannot be opened ({in_a_line(error)})", remedy) from None
        self.root = str(root).rstrip("/")
        self.is_folder, self.is_memory = protocol in ("file", "local"), protocol == "memory"
        self.poll_seconds = 0.05 if self.is_folder or self.is_memory else 1.0
        if self.is_folder:
            with self.reported("written"):
                for folder in (*FOLDERS, "temporary"):
                    Path(self.root, folder).mkdir(parents=True, exist_ok=True)
                for left in Path(self.root, "temporary").glob(f"{owner}-*"):  # by a process that was killed
                    left.unlink()

    def create(self, name: str, data: bytes) -> bytes:
        """Create the object unless it exists, and return what is there: these bytes, or others.

        If the answer of a store is lost and the client tries again, it finds its own object.
        """
        with self.reported("written"):
            try:
                self.put_new(name, data)
            except FileExistsError:
                pass
            except OSError:
                if self.read(name) is None:
                    raise
            else:
                self.sent += len(data)
                return data
        there = self.read(name)
        if there is None:
            problem = f"{name} exists in {self.url} and cannot be read"
            raise DataError("store", problem, "look whether another program deletes objects there")
        return there

    def put_new(self, name: str, data: bytes) -> None:
        """Create the object, or raise FileExistsError."""
        if self.is_folder:
            temporary = Path(self.root, "temporary", f"{self.owner}-{uuid.uuid4().hex}")
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(temporary, Path(self.root, name))
            finally:
                temporary.unlink(missing_ok=True)
            return
        with MEMORY_LOCK if self.is_memory else contextlib.nullcontext():
            self.files.pipe_file(f"{self.root}/{name}", data, mode="create")

    def read(self, name: str) -> bytes | None:
        """Return the object, or None if there is none."""
        with self.reported("read"):
            try:
                return bytes(self.files.cat_file(f"{self.root}/{name}"))
            except FileNotFoundError:
                return None

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects in a folder, sorted."""
        with self.reported("read"):
            try:
                paths = self.files.ls(f"{self.root}/{folder}", detail=False)
            except FileNotFoundError:  # a bucket has no empty folders
                return []
        return sorted(f"{folder}/{str(path).rsplit('/', 1)[-1]}" for path in paths)

    def delete(self, name: str) -> None:
        """Delete the object if it exists."""
        with self.reported("written"), contextlib.suppress(FileNotFoundError):
            self.files.rm_file(f"{self.root}/{name}")

    @contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Raise an error of the store as one of ours, in a sentence."""
        try:
            yield
        except ComposerError:
            raise
        except Exception as error:  # botocore's and Google's errors are of many classes
            reason = getattr(error, "strerror", None) or in_a_line(error)
            remedy = "name a store where this process can write" if what == "written" else "check the store"
            raise DataError("store", f"{self.url} cannot be {what} ({reason})", remedy) from error


def stored_tensors(data: bytes) -> Any:
    """Return the tensors of a safetensors file, or None if it is cut off or something else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except SafetensorError:
        return None
