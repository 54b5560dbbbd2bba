"""Objects of a folder and of fsspec's other stores."""

import sys
from pathlib import Path
from typing import Any

import fsspec
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


class Refusing(MemoryFileSystem):
    """A store that raises what its class has."""

    protocol, error = "refusing", Exception()

    def pipe_file(self, *_: Any, **__: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError("Access Denied"), "PermissionError: Access Denied"),
        (ValueError("Unable to locate\ncredentials"), "ValueError: Unable to locate credentials"),
    ],
)
def test_a_store_that_cannot_be_written_is_an_error(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception of a package for a store, as botocore's NoCredentialsError is one of no other class."""
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    monkeypatch.setattr(Refusing, "error", error)
    remedy = "set its credentials in the environment, or name another"
    with pytest.raises(ConfigError) as raised:
        ObjectStore("refusing://bucket").check_writable()
    assert str(raised.value) == f"store: refusing://bucket cannot be written ({said}); {remedy}"


def test_the_check_of_a_store_leaves_what_is_there(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    store.write("round-000001/replica-0.json", b"a marker")
    store.check_writable()
    store.check_writable()
    assert store.read("round-000001/replica-0.json") == b"a marker"
