"""A folder or a bucket of objects, by a URL of fsspec's: "/mnt/run1", "s3://bucket/run1", "gs://bucket/run1"."""

import fsspec
from fsspec.implementations.local import LocalFileSystem

from composer_plugins.errors import ConfigError, in_a_line, writing


class ObjectStore:
    """Reads and writes whole objects. Names are relative to the URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self.files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # s3fs or gcsfs is not installed; no such protocol
            remedy = "name a folder, or a URL of s3:// or gs:// after installing s3fs or gcsfs"
            raise ConfigError("store", f"{url} cannot be opened ({in_a_line(error)})", remedy) from None
        self.root = str(root).rstrip("/")
        self.is_folder = isinstance(self.files, LocalFileSystem)
        if self.is_folder:
            with writing("store", url):
                self.files.makedirs(self.root, exist_ok=True)
        self.poll_seconds = 0.05 if self.is_folder else 1.0

    def check_writable(self) -> None:
        """Raise ConfigError unless an object can be written and read. Nothing is deleted."""
        try:
            self.write("writable", b"yes")
            if self.read("writable") != b"yes":
                raise OSError("an object was written and cannot be read")
        except Exception as error:  # of credentials, rights or the network: each package has its own classes
            problem = f"{self.url} cannot be written ({in_a_line(error, most=300)})"
            remedy = "set its credentials in the environment, or name another"
            raise ConfigError("store", problem, remedy) from None

    def write(self, name: str, data: bytes) -> None:
        """Write an object. Until this returns, a reader may find a part of it."""
        path = f"{self.root}/{name}"
        if self.is_folder:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(path, data)

    def read(self, name: str) -> bytes | None:
        """Return the object, or None if there is none."""
        try:
            return bytes(self.files.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None
