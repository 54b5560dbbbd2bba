"""Objects are created once, as a whole, or not at all."""

import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_plugins.errors import ComposerError, ConfigError, DataError
from composer_plugins.recipes.diloco.object_store import ObjectStore
from parity_tests.recipes.diloco.tiny import read_lines, write_line
from parity_tests.rigs.forked import ended, processes


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "folder" else f"memory:/{tmp_path}"


def test_an_object_is_created_once(url: str) -> None:
    store = ObjectStore(url)
    assert store.read("commits/1") is None and store.names("commits") == []
    assert store.create("commits/1", b"first") == b"first"
    assert store.create("commits/1", b"second") == b"first"
    assert store.sent == len(b"first")
    assert ObjectStore(url).read("commits/1") == b"first" and store.names("commits") == ["commits/1"]
    store.delete("commits/1")
    store.delete("commits/1")
    assert store.read("commits/1") is None


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_of_many_that_create_one_object_one_does(url: str) -> None:
    """Every thread with a store of its own, as every process has."""
    stores = [ObjectStore(url, owner=str(one)) for one in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for number in range(200):
            data = [f"{number} of {one}".encode() * 100 for one in range(8)]
            there = list(pool.map(ObjectStore.create, stores, [f"commits/{number}"] * 8, data))
            assert len(set(there)) == 1 and there[0] in data


def test_the_answer_to_a_put_may_be_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object is there, and the client says that it failed."""
    put_new = ObjectStore.put_new

    def lose_the_answer(self: ObjectStore, name: str, data: bytes) -> None:
        put_new(self, name, data)
        raise OSError("connection reset")

    monkeypatch.setattr(ObjectStore, "put_new", lose_the_answer)
    assert ObjectStore(url).create("deltas/1", b"mine") == b"mine"


def test_what_a_killed_process_left_is_removed_when_it_starts_again(tmp_path: Path) -> None:
    ObjectStore(str(tmp_path), owner="1")
    for name in ("1-half", "11-half", "2-half"):
        (tmp_path / "temporary" / name).touch()
    ObjectStore(str(tmp_path), owner="1")
    assert {path.name for path in (tmp_path / "temporary").iterdir()} == {"11-half", "2-half"}


def open_as_nobody(url: str, log: str) -> None:
    """Root is denied nothing."""
    if os.getuid() == 0:
        os.setuid(65534)
    for action in (lambda: ObjectStore(url + "/new"), lambda: ObjectStore(url).create("run.json", b"{}")):
        try:
            action()
        except ComposerError as error:
            write_line(log, str(error))


def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder, log = Path(parent, "store"), Path(parent, "log")
        ObjectStore(str(folder))
        os.chmod(folder, 0o555)
        os.chmod(folder / "temporary", 0o555)
        log.touch()
        log.chmod(0o666)
        with processes(open_as_nobody) as start:
            assert ended(start(str(folder), str(log))) == 0
        remedy = "cannot be written (Permission denied); name a store where this process can write"
        assert read_lines(log) == [f"store: {folder}/new {remedy}", f"store: {folder} {remedy}"]
        with pytest.raises(DataError, match=r"log cannot be written \("):
            ObjectStore(str(log))  # a file


@pytest.mark.parametrize("url", ["nothing://here", "https://example.org/store", "zip://x", "s3://bucket/run"])
def test_only_stores_with_exclusive_creation_are_accepted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # not installed
    with pytest.raises(ConfigError, match="name a folder, or a URL of s3:// or gs://"):
        ObjectStore(url)
