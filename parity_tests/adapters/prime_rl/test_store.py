"""The store: what was committed is there, bit for bit, whatever happened to the process that wrote it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_plugins.adapters.prime_rl_parts import segments
from composer_plugins.adapters.prime_rl_parts.segments import UNFINISHED
from composer_plugins.adapters.prime_rl_store import Store, StoreWriter
from composer_plugins.errors import ConfigError, DataError
from parity_tests.support.paths import ROOT

# Needed, and not by the rest of the adapter: the extra "prime-rl".
safetensors = pytest.importorskip("safetensors", reason="pip install 'composer-plugins[prime-rl]'")

RECORDS = 20  # of one flush of `WRITE`

# Record i of flush f, and what it holds: known to the test without asking the writer.
WRITE = f"""
import os, signal, sys
import numpy as np
from composer_plugins.adapters.prime_rl_store import StoreWriter
from parity_tests.support.paths import ROOT
writer = StoreWriter(sys.argv[1])
dies = int(sys.argv[2])
sync, flush = os.fsync, 0

def fsync(file):
    if flush == dies:
        os.ftruncate(file, 1000)
        os.kill(os.getpid(), signal.SIGKILL)
    sync(file)

os.fsync = fsync
while True:
    for i in range({RECORDS}):
        writer.put([flush, i, *range(500)], np.full(502, -1.0 - flush - i / 32), "reference")
    writer.flush()
    print(flush, flush=True)
    flush += 1
"""


def start_writer(path: Path, dies: int = -1) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITE, str(path), str(dies)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def flushes(store: Store) -> int:
    """How many flushes of the writer are in the store, each of them complete and as it was written."""
    count, rest = divmod(len(store), RECORDS)
    assert rest == 0
    for flush in range(count):
        for i in range(RECORDS):
            values = store.get([flush, i, *range(500)], "reference")
            assert values is not None
            assert np.array_equal(values, np.full(502, -1.0 - flush - i / 32, dtype=np.float32))
    return count


def test_a_store_gives_back_float32_for_exactly_these_tokens_and_this_kind(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store") as writer:
        writer.put([1, 2, 3], [-0.1, -0.2, 0.0], "reference")
        writer.put([1, 2, 3], [0.0, 0.0, 0.7], "replay")
        writer.put(np.array([1, 2], dtype=np.int32), [0.0, -1e-3], "replay")
    store = Store(tmp_path / "store")
    assert len(store) == 3
    reference, replay = store.get([1, 2, 3], "reference"), store.get((1, 2, 3), "replay")
    assert reference is not None and replay is not None
    assert reference.dtype == np.float32
    assert reference.tolist() == np.float32([-0.1, -0.2, 0.0]).tolist()
    assert replay.tolist() == np.float32([0.0, 0.0, 0.7]).tolist()
    assert store.get(np.array([1, 2]), "replay") is not None
    for other in ([1, 2], [1, 2, 4], [3, 2, 1], [1, 2, 3, 4], [0x0000000200000001, 3], [1, 2, 3 + 2**32]):
        assert store.get(other, "reference") is None


def test_a_writer_that_kills_itself_in_mid_file_leaves_what_it_committed(tmp_path: Path) -> None:
    with start_writer(tmp_path, dies=4) as process:
        assert process.wait(60) == -signal.SIGKILL
    (torn,) = tmp_path.glob(f"*{UNFINISHED}")
    assert flushes(Store(tmp_path)) == 4  # a reader leaves the writer's file alone
    with pytest.warns(UserWarning, match=torn.name), StoreWriter(tmp_path) as writer:
        assert not torn.exists()
        assert flushes(writer) == 4
        writer.put([9], [-1.0], "reference")
    assert Store(tmp_path).get([9], "reference") is not None


@pytest.mark.parametrize("after", [1, 5])
def test_a_writer_that_is_killed_at_any_time_leaves_what_it_committed(tmp_path: Path, after: int) -> None:
    with start_writer(tmp_path) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(after)]
        time.sleep(0.001 * (os.getpid() % 7))
        process.kill()
        said += process.stdout.readlines()
    committed = sum(line.endswith("\n") for line in said)
    assert flushes(Store(tmp_path)) >= committed >= after
    torn = list(tmp_path.glob(f"*{UNFINISHED}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with StoreWriter(tmp_path) as writer:
            assert flushes(writer) >= committed
    assert [str(torn[0]) in str(one.message) for one in caught] == [True] * len(torn)


def test_a_committed_file_that_was_cut_is_left_out_with_a_warning(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        for i in range(2):
            writer.put([i], [-1.0], "reference")
            writer.flush()
    first = min(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        first.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match=f"left out: .*{first.name} is not a whole file"):
            store = Store(tmp_path)
        assert store.get([0], "reference") is None
        assert store.get([1], "reference") is not None


def test_a_store_without_its_first_file_loses_no_other_one_to_the_next_flush(tmp_path: Path) -> None:
    def put(i: int) -> None:
        with StoreWriter(tmp_path) as writer:
            writer.put([i], [-1.0], "reference")

    for i in range(3):
        put(i)
    min(tmp_path.glob("*.safetensors")).unlink()
    put(3)
    store = Store(tmp_path)
    assert [store.get([i], "reference") is not None for i in range(4)] == [False, True, True, True]


def test_a_file_that_could_not_be_read_is_read_once_it_can(tmp_path: Path) -> None:
    for value in (-1.0, -2.0):
        with StoreWriter(tmp_path) as writer:
            writer.put([1], [value], "reference")
            writer.put([int(-value), 5], [value] * 2, "reference")
    first = min(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[:100])
    with pytest.warns(UserWarning, match="left out"):
        store = Store(tmp_path)
    store.refresh()  # warnings are errors: of what is as it was, nothing is said again
    first.write_bytes(whole)
    store.refresh()
    assert len(store) == 3
    latest = store.get([1], "reference")
    assert latest is not None and latest.tolist() == [-2.0]  # the file that came late is the older one


def test_a_store_that_was_built_anew_at_its_path_is_read_anew(tmp_path: Path) -> None:
    def build(token: int) -> None:
        with StoreWriter(tmp_path / "store") as writer:
            writer.put([token], [-1.0], "reference")

    build(1)
    store = Store(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    build(2)
    store.refresh()
    assert store.get([1], "reference") is None and store.get([2], "reference") is not None
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(ConfigError, match="no store at"):
        store.refresh()


def test_what_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for kind in (Store, StoreWriter):
        for path in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ConfigError, match=f"{path}: (Not a directory|File exists)"):
                kind(path)
    with StoreWriter(tmp_path / "store") as writer:
        writer.put([1], [-1.0], "reference")

    def denied(path: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:  # the tests may run as root, who is denied nothing
        patch.setattr(segments.Path, "open", denied)
        with pytest.warns(UserWarning, match="left out: .*00000000.safetensors: Permission denied"):
            store = Store(tmp_path / "store")
    store.refresh()
    assert len(store) == 1
    for name, kind in (("scandir", Store), ("open", StoreWriter), ("scandir", StoreWriter)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, denied)
            with pytest.raises(ConfigError, match="store: Permission denied"):
                kind(tmp_path / "store")


def test_what_is_put_into_a_closed_writer_is_not_lost_in_silence(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.put([1], [-1.0], "reference")


def test_a_child_neither_keeps_the_lock_nor_writes(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from composer_plugins.adapters.prime_rl_store import StoreWriter\n"
        "writer = StoreWriter(sys.argv[1]); writer.put([1], [-1.0], 'reference')\n"
        "told, tell = os.pipe(); ended, end = os.pipe()\n"
        "if not os.fork():\n"
        "    try: writer.put([2], [-1.0], 'reference')\n"
        "    except ValueError as error: os.write(tell, str(error).encode())\n"
        "    writer.close(); assert not list(writer.path.glob('*.safetensors'))\n"
        "    os.write(tell, b' closed'); os._exit(0)\n"
        "time.sleep(0.1); os.wait(); print(os.read(told, 999).decode())\n"
        "try: StoreWriter(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "if not os.fork(): os.close(end); os.read(ended, 1); os._exit(0)\n"
        "writer.close(); StoreWriter(sys.argv[1]).close(); print('free'); os.close(end); os.wait()\n"
    )
    run = [sys.executable, "-c", program, str(tmp_path)]
    child, second, free = subprocess.check_output(run, cwd=ROOT, text=True, timeout=60).splitlines()
    assert "opened in process" in child and child.endswith(" closed")
    assert "has a writer already" in second and free == "free"
    assert len(Store(tmp_path)) == 1


def test_a_reader_sees_whole_flushes_while_a_writer_adds(tmp_path: Path) -> None:
    with start_writer(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        store, seen = Store(tmp_path), []
        while not seen or seen[-1] < seen[0] + 5:
            store.refresh()
            seen.append(flushes(store))
        process.kill()
    assert seen == sorted(seen)


def test_uncommitted_records_are_not_seen(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        reader = Store(tmp_path)
        writer.put([1], [-1.0], "reference")
        reader.refresh()
        assert writer.get([1], "reference") is None and reader.get([1], "reference") is None
        writer.flush()
        assert writer.get([1], "reference") is not None and reader.get([1], "reference") is None
        reader.refresh()
        assert reader.get([1], "reference") is not None


def test_of_two_values_the_last_counts_and_the_same_is_not_written_again(tmp_path: Path) -> None:
    def put(value: float) -> None:
        with StoreWriter(tmp_path) as writer:
            writer.put([1], [value], "reference")

    for value in (-1.0, -1.0, -2.0):
        put(value)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    found = Store(tmp_path).get([1], "reference")
    assert found is not None and found.tolist() == [-2.0]
    with StoreWriter(tmp_path) as writer:
        writer.put([1], [-3.0], "reference")
        writer.put([1], [-4.0], "reference")
    found = Store(tmp_path).get([1], "reference")
    assert found is not None and found.tolist() == [-4.0]


def test_a_second_writer_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    first = StoreWriter(tmp_path)
    with pytest.raises(ConfigError, match=f"a writer already, process {os.getpid()}"):
        StoreWriter(tmp_path)
    with start_writer(tmp_path) as process:
        assert process.wait(60) != 0
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="closed"):
        first.flush()
    StoreWriter(tmp_path).close()


@pytest.mark.parametrize(
    ("token_ids", "values", "kind", "said"),
    [
        ([1, 2], [-1.0], "reference", "reference of 2 tokens: 2 numbers wanted"),
        ([1, 2], [-1.0, float("nan")], "reference", "nan at position 1"),
        ([1, 2], [-1.0, float("nan")], "replay", "nan at position 1"),
        ([1, 2], [-1.0, 0.5], "reference", "0.5 at position 1 is positive"),
        ([1, 2], [0.0, 0.0], "reference", "exactly 0.0"),
        ([1, 2], [0.0, 1e-60], "replay", "nothing but 0 or an infinity"),
        ([1, 2], [0.0, 1e60], "replay", "nothing but 0 or an infinity"),
        ([], [], "reference", "integers wanted"),
        ([1.0, 2.0], [-1.0, -1.0], "reference", "integers wanted, not float64"),
        ([[1, 2]], [-1.0], "reference", "integers wanted"),
        ([True, False], [-1.0, -1.0], "reference", "integers wanted"),
        ([True, 2], [-1.0, -1.0], "reference", "integers wanted"),
        (["1", "2"], [-1.0, -1.0], "reference", "integers wanted"),
        ([[1], [2, 3]], [-1.0, -1.0], "reference", "integers wanted"),
        (None, [-1.0], "reference", "integers wanted"),
        ([1, -1], [-1.0, -1.0], "reference", "-1 is no token id"),
        (
            np.array([1, 2**63], dtype=np.uint64),
            [-1.0] * 2,
            "reference",
            "9223372036854775808 is no token id",
        ),
        ([1, 2], ["-0.5", "-0.5"], "reference", "numbers wanted"),
        ([1, 2], ["0.5", "0.5"], "replay", "numbers wanted"),
        ([1, 2], [True, True], "replay", "numbers wanted"),
        ([1, 2], [True, 0.5], "replay", "numbers wanted"),
        ([1, 2], [0.5, None], "replay", "numbers wanted"),
        ([1, 2], [[0.5], [0.5, 0.5]], "replay", "numbers wanted"),
    ],
)
def test_what_cannot_be_a_record_is_refused(
    tmp_path: Path, token_ids: Any, values: Any, kind: str, said: str
) -> None:
    with StoreWriter(tmp_path) as writer, pytest.raises(DataError, match=said):
        writer.put(token_ids, values, kind)  # type: ignore[arg-type]
    assert len(Store(tmp_path)) == 0


def test_unknown_kinds_and_missing_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no store at .*nowhere"):
        Store(tmp_path / "nowhere")
    with StoreWriter(tmp_path) as writer, pytest.raises(ConfigError, match="did you mean 'reference'"):
        writer.put([1], [-1.0], "referense")  # type: ignore[arg-type]


def test_a_store_of_a_later_format_is_not_read_as_this_one(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "00000000.safetensors", metadata={"composer_plugins": "9"})
    with pytest.warns(UserWarning, match="has format '9'"):
        Store(tmp_path)


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = StoreWriter(tmp_path)
    writer.put([1], [-1.0], "reference")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.numpy", None)
        with pytest.raises(ConfigError, match=r"composer-plugins\[prime-rl\]"):
            writer.flush()
    writer.close()  # what was put is still there to be committed
    assert len(Store(tmp_path)) == 1


def test_a_writer_starts_and_puts_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from composer_plugins.adapters.prime_rl_store import StoreWriter\n"
        "with StoreWriter(sys.argv[1]) as writer: writer.put([1], [-1.0], 'reference')\n"
        "print('torch' in sys.modules)"
    )
    run = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.check_output(run, cwd=ROOT, text=True).split() == ["False"]
