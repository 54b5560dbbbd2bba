"""Objects of a folder and of fsspec's other stores."""

import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.object_store import ObjectStore


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_an_object_is_read_as_it_was_written_last(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path / "store") if kind == "folder" else f"memory:/{tmp_path}"
    assert ObjectStore(url).read("round-1/a") is None
    for data in (b"longer", b"short"):
        ObjectStore(url).write("round-1/a", data)
        assert ObjectStore(url).read("round-1/a") == data


@pytest.mark.parametrize("below", ["", "/run1"])
def test_a_file_instead_of_a_folder_is_an_error(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"store: '{tmp_path}/file{below}' cannot be written"):
        ObjectStore(f"{tmp_path}/file{below}")


@pytest.mark.parametrize("url", ["nothing://here", "s3://bucket/run"])
def test_a_store_that_cannot_be_opened_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # not installed
    with pytest.raises(ConfigError, match="name a folder, or a URL of s3:// or gs://"):
        ObjectStore(url)


def test_a_store_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception of a package for a store, as botocore's NoCredentialsError is one of no other class."""

    def pipe_file(*_: Any) -> None:
        raise ValueError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    said = "store: memory://bucket cannot be written .ValueError: Unable to locate credentials.; set its cred"
    with pytest.raises(ConfigError, match=said):
        ObjectStore("memory://bucket").check_writable()
