"""The store: what was committed is there, bit for bit, whatever happened to the process that wrote it."""

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.prime_rl import store as module
from composer_plugins.recipes.prime_rl.store import Store, StoreWriter
from parity_tests.rigs.paths import ROOT

IMPORTS = """
import os, random, signal, sys, tempfile, time
import numpy as np
from composer_plugins.recipes.prime_rl.store import Store, StoreWriter
"""

# Record i of flush f, and what it holds: known to the reader without asking the writer.
FLUSHES = """
RECORDS = 5

def record(flush, i):
    return [flush, i, *range(500)], np.full(502, -1.0 - flush - i / 32, dtype=np.float32)

def write(path, flush, last, committed):
    writer = StoreWriter(path)
    while flush < last:
        for i in range(RECORDS):
            token_ids, values = record(flush, i)
            writer.put(token_ids, values, "reference")
        writer.flush()
        committed()
        flush += 1

def flushes(store, first=0):
    count, rest = divmod(len(store), RECORDS)
    assert rest == 0, "a part of a flush"
    for flush in range(first, count):
        for i in (0, RECORDS - 1):
            token_ids, values = record(flush, i)
            assert np.array_equal(store.get(token_ids, "reference"), values), (flush, i)
    return count
"""
exec(IMPORTS + FLUSHES)
flushes: Any = globals()["flushes"]
RECORDS: int = globals()["RECORDS"]


def run(program: str, *arguments: Any, wait: bool = True) -> Any:
    command = [sys.executable, "-c", IMPORTS + FLUSHES + program, *map(str, arguments)]
    if not wait:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return subprocess.check_output(command, cwd=ROOT, text=True, timeout=600)


def put(path: Path, *records: tuple[list[int], float]) -> None:
    with StoreWriter(path) as writer:
        for token_ids, value in records:
            writer.put(token_ids, [value] * len(token_ids), "reference")


def value(path: Path, *token_ids: int) -> float | None:
    found = Store(path).get(token_ids, "reference")
    return None if found is None else float(found[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pairs of ? 100%.store"


def test_a_store_gives_back_float32_for_exactly_these_tokens_and_this_kind(path: Path) -> None:
    with StoreWriter(path) as writer:
        writer.put([1, 2, 3], [-0.1, -0.2, 0.0], "reference")
        writer.put([1, 2, 3], [0.0, 0.0, 0.7], "replay")
        writer.put(np.array([1, 2], dtype=np.int32), [0.0, -1e-3], "replay")
    store = Store(path)
    assert len(store) == 3
    reference, replay = store.get([1, 2, 3], "reference"), store.get((1, 2, 3), "replay")
    assert reference is not None and replay is not None
    assert reference.dtype == np.float32
    assert reference.tolist() == np.float32([-0.1, -0.2, 0.0]).tolist()
    assert replay.tolist() == np.float32([0.0, 0.0, 0.7]).tolist()
    assert store.get(np.array([1, 2]), "replay") is not None
    for other in ([1, 2], [1, 2, 4], [3, 2, 1], [1, 2, 3, 4], [0x0000000200000001, 3], [1, 2, 3 + 2**32]):
        assert store.get(other, "reference") is None


# Writers in processes of their own, killed at a random time; each tenth begins another store.
KILL = """
path, draw, first, total = "", random.Random(0), 0, 0
for kill in range(int(sys.argv[2])):
    if kill % 10 == 0:
        path, first = f"{sys.argv[1]}/{kill}.store", 0
    commits, committed_one = os.pipe()
    child = os.fork()
    if not child:
        write(path, first, sys.maxsize, lambda: os.write(committed_one, b"."))
    os.close(committed_one)
    time.sleep(draw.expovariate(1 / 0.05))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "it ended by itself"
    with open(commits, "rb") as pipe:
        committed = first + len(pipe.read())
    try:
        found = flushes(Store(path), first)
    except ValueError as error:
        said = str(error)
        assert committed == 0 and ("there is no store" in said or "is an empty file" in said), said
        found = 0
    assert committed <= found <= committed + 1, (committed, found)
    total, first = total + found - first, found
print(total)
"""


@pytest.mark.parametrize("kills", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_at_any_time_leaves_what_it_committed(tmp_path: Path, kills: int) -> None:
    assert int(run(KILL, tmp_path, kills)) > kills / 4  # not every kill came before the first commit


def test_a_commit_waits_for_the_disk_and_leaves_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    connected = module._connected

    def traced(*given: Any) -> sqlite3.Connection:
        connection = connected(*given)
        connection.set_trace_callback(done.append)
        return connection

    monkeypatch.setattr(module, "_connected", traced)
    put(path, ([1], -1.0))
    assert "PRAGMA journal_mode = WAL" in done and "PRAGMA synchronous = FULL" in done
    assert done.index("PRAGMA synchronous = FULL") < len(done) - 1 - done[::-1].index("COMMIT")
    assert os.listdir(path.parent) == [path.name]  # a copy of it misses nothing


def test_readers_see_whole_flushes_while_a_writer_adds(path: Path) -> None:
    StoreWriter(path)
    program = "write(sys.argv[1], 0, 10**9, lambda: print(flush=True))"
    with run(program, path, wait=False) as process:
        process.stdout.readline()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        store, seen = Store(path), [0]
        while seen[-1] < 8:
            seen.append(flushes(store, first=seen[-1]))
        process.kill()
    assert seen == sorted(seen)


def test_writers_take_turns(path: Path) -> None:
    program = "write(sys.argv[1], int(sys.argv[2]), int(sys.argv[2]) + 20, lambda: None)"
    writers = [run(program, path, first, wait=False) for first in (0, 20)]
    for writer in writers:
        with writer:
            assert writer.wait(120) == 0
    assert flushes(Store(path)) == 40


def test_a_writer_that_waits_too_long_says_so_and_keeps_what_was_put(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    with StoreWriter(path) as writer:
        writer.put([1], [-1.0], "reference")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for attempt in (writer.flush, lambda: StoreWriter(path)):
                with pytest.raises(ConfigError, match="another process has been writing for more than 0.05"):
                    attempt()
            assert len(Store(path)) == 0  # readers do not wait
    assert value(path, 1) == -1.0


def test_a_fork_starts_with_nothing_put_and_may_write_itself(path: Path) -> None:
    program = """
writer = StoreWriter(sys.argv[1]); writer.put([1], [-1.0], "reference")
child = os.fork()
if not child:
    writer.put([2], [-2.0], "reference"); writer.close()
    assert len(Store(sys.argv[1])) == 1
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.put([2], [-3.0], "reference"); writer.close()
"""
    run(program, path)
    assert [value(path, 1), value(path, 2), len(Store(path))] == [-1.0, -3.0, 2]


def test_a_store_is_read_where_nobody_can_write() -> None:
    """In a process of an ordinary user, for root is denied nothing."""
    program = """
folder = tempfile.mkdtemp(dir="/tmp"); path = folder + "/a.store"
writer = StoreWriter(path); writer.put([1], [-1.0], "reference"); writer.flush()
os.chmod(folder, 0o555); os.chmod(path, 0o444)
child = os.fork()
if not child:
    if os.getuid() == 0:
        os.setuid(65534)
    print(Store(path).get([1], "reference"))
    try:
        StoreWriter(path)
    except ValueError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0); os.chmod(folder, 0o755); os.unlink(path); os.rmdir(folder)
"""
    read, rejected = run(program).splitlines()
    assert read == "[-1.]" and "cannot be read or written (attempt to write a readonly database)" in rejected


def test_what_is_cut_off_or_foreign_is_one_error(path: Path) -> None:
    put(path, *(([i, 1], -1.0) for i in range(2000)))
    whole = path.read_bytes()
    for length in (0, 5, 100, 4096, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:length])
        said = r"is cut off|database disk image is malformed" if length else "store: is an empty file; write"
        with pytest.raises(DataError, match=said):
            Store(path)
    path.write_text("[trainer.loss]\n" * 1000)
    for kind in (Store, StoreWriter):
        with pytest.raises(DataError, match=r"store: is not a store of composer-plugins; name another file"):
            kind(path)
    assert path.read_text().startswith("[trainer.loss]")
    path.unlink()
    with closing(sqlite3.connect(path)) as foreign:
        foreign.execute("CREATE TABLE records (key, numbers)")
    for kind in (Store, StoreWriter):
        with pytest.raises(DataError, match=r"store: is not a store of composer-plugins; name another file"):
            kind(path)
    with closing(sqlite3.connect(path)) as later:
        later.executescript(f"PRAGMA application_id = {module.APPLICATION}; PRAGMA user_version = 9")
    with pytest.raises(DataError, match="has format 9, and this version reads 1"):
        Store(path)


def test_what_cannot_be_opened_says_why(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"100%.store: there is no store; write one with StoreWriter"):
        Store(path)
    path.write_text("")
    for kind, below in ((Store, path / "below"), (StoreWriter, path / "below"), (Store, path.parent)):
        with pytest.raises(ConfigError, match=f"{below.name}: (cannot be|there is no store)"):
            kind(below)


def test_a_path_with_a_nul_character_touches_no_file(path: Path) -> None:
    for kind in (Store, StoreWriter):
        with pytest.raises(ConfigError, match="it has a NUL character; give the name of a file"):
            kind(f"{path}\0x")
    assert not path.exists()
    with pytest.raises(ConfigError, match="cannot be opened: File name too long; give a file"):
        StoreWriter(path.with_name("x" * 300))


def test_a_log_that_its_writer_removes_meanwhile_is_no_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(path, ([1], -1.0))
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was a moment ago
    assert value(path, 1) == -1.0


def test_a_store_without_its_table_is_not_whole(path: Path) -> None:
    put(path, ([1], -1.0))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE records")
    with pytest.raises(DataError, match=r"is not a whole store \(no such table: records\)"):
        Store(path)


def test_a_store_that_was_replaced_at_its_path_is_read_anew(path: Path) -> None:
    put(path, ([1], -1.0))
    store = Store(path)
    path.unlink()
    put(path, ([2], -1.0))
    assert store.get([1], "reference") is None and store.get([2], "reference") is not None
    path.unlink()
    with pytest.raises(ConfigError, match="there is no store"):
        store.get([1], "reference")


def test_what_is_put_is_seen_by_everybody_once_it_is_flushed(path: Path) -> None:
    with StoreWriter(path) as writer:
        reader = Store(path)
        writer.put([1], [-1.0], "reference")
        assert writer.get([1], "reference") is None and reader.get([1], "reference") is None
        writer.flush()
        assert writer.get([1], "reference") is not None and reader.get([1], "reference") is not None
    writer.close()
    with pytest.raises(ConfigError, match="this writer is closed"):
        writer.put([1], [-1.0], "reference")


def test_of_two_values_the_last_one_counts(path: Path) -> None:
    for given in (-1.0, -1.0, -2.0):
        put(path, ([1], given))
    put(path, ([1], -3.0), ([1], -4.0))
    assert value(path, 1) == -4.0 and len(Store(path)) == 1


@pytest.mark.parametrize(
    ("token_ids", "values", "kind", "said"),
    [
        ([1, 2], [-1.0, 0.5], "reference", "it holds 0.5 at position 1"),
        ([1, 2], [0.0, 0.0], "reference", "exactly 0.0"),
        ([1, 2], [0.0, 1e-60], "replay", "0 throughout in float32"),
        ([1, 2], [0.0, 1e60], "replay", r"1e\+60 at position 1; .* within the range of float32"),
        (np.array([], dtype=np.int64), [], "reference", "no token"),
        ([1.0, 2.0], [-1.0, -1.0], "reference", "float64 .* integers"),
        (["1", "2"], [-1.0, -1.0], "reference", "list of integers"),
        (None, [-1.0], "reference", "list of integers"),
        ([1, -1], [-1.0, -1.0], "reference", "-1 is not a token id"),
        (np.array([1, 2**63], dtype=np.uint64), [-1.0] * 2, "reference", "9223372036854775808 is not a tok"),
    ],
)
def test_what_cannot_be_a_record_is_rejected(
    path: Path, token_ids: Any, values: Any, kind: Any, said: str
) -> None:
    with StoreWriter(path) as writer, pytest.raises(DataError, match=said):
        writer.put(token_ids, values, kind)
    assert len(Store(path)) == 0


def test_an_unknown_kind_is_named(path: Path) -> None:
    with StoreWriter(path) as writer, pytest.raises(ConfigError, match="did you mean 'reference'"):
        writer.put([1], [-1.0], "referense")  # type: ignore[arg-type]


def test_a_store_is_written_and_read_without_torch(path: Path) -> None:
    program = (
        "write(sys.argv[1], 0, 1, lambda: None); flushes(Store(sys.argv[1])); print('torch' in sys.modules)"
    )
    assert run(program, path).split() == ["False"]
