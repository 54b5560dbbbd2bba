"""The store: what was committed is there, bit for bit, for whoever opens the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.recipes.prime_rl.store import Store, StoreWriter


def test_a_store_gives_back_float32_for_exactly_these_tokens_and_this_kind(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "new" / "pairs of ? 100%.store") as writer:
        writer.put([1, 2, 3], [-0.1, -0.2, 0.0], "reference")
        writer.put([1, 2, 3], [0.0, 0.0, 0.7], "replay")
        writer.put(np.array([1, 2], dtype=np.int32), [0.0, -1e-3], "replay")
    store = Store(writer.path)
    reference, replay = store.get([1, 2, 3], "reference"), store.get((1, 2, 3), "replay")
    assert reference is not None and replay is not None
    assert reference.dtype == np.float32
    assert reference.tolist() == np.float32([-0.1, -0.2, 0.0]).tolist()
    assert replay.tolist() == np.float32([0.0, 0.0, 0.7]).tolist()
    assert store.get([1, 2], "replay") is not None
    for other in ([1, 2], [1, 2, 4], [3, 2, 1], [1, 2, 3, 4], [0x0000000200000001, 3], [1, 2, 3 + 2**32]):
        assert store.get(other, "reference") is None


def test_a_reader_sees_what_is_flushed_and_the_last_value_counts(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "pairs.store")
    reader = Store(writer.path)
    for value in (-1.0, -2.0):
        writer.put([1], [value], "reference")
        before = reader.get([1], "reference")
        assert (None if before is None else before.tolist()) == (None if value == -1 else [-1.0])
        writer.flush()
    found = reader.get([1], "reference")
    assert found is not None and found.tolist() == [-2.0]


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([-1.0, 0.5], "reference", "it holds 0.5 at position 1"),
        ([0.0, 0.0], "reference", "exactly 0.0"),
        ([0.0, 1e60], "replay", r"1e\+60 at position 1; .* within the range of float32"),
        ([-1.0], "reference", "1 numbers for 2 tokens"),
    ],
)
def test_what_cannot_be_a_record_is_rejected(tmp_path: Path, values: Any, kind: Any, said: str) -> None:
    with StoreWriter(tmp_path / "pairs.store") as writer, pytest.raises(DataError, match=said):
        writer.put([1, 2], values, kind)
    assert Store(writer.path).get([1, 2], kind) is None


@pytest.mark.parametrize(
    ("token_ids", "said"),
    [
        ([1.2, 2.0], "float64 of shape .2,.; pass one list of integers"),
        ([[1, 2], [3, 4]], r"int64 of shape \(2, 2\)"),
        ([1, -1], "-1 is not a token id; pass ids from 0"),
        (np.array([1, 2**63], dtype=np.uint64), "9223372036854775808 is not a token id"),
    ],
    ids=["floats", "nested", "negative", "beyond int64"],
)
def test_what_are_no_token_ids_is_rejected(tmp_path: Path, token_ids: Any, said: str) -> None:
    writer = StoreWriter(tmp_path / "pairs.store")
    for use in (
        lambda: writer.put(token_ids, [-1.0] * 2, "replay"),
        lambda: Store(writer.path).get(token_ids, "replay"),
    ):
        with pytest.raises(DataError, match=f"token_ids: {said}"):
            use()


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    wrong: Any = "refrence"
    writer = StoreWriter(tmp_path / "pairs.store")
    for use in (lambda: writer.put([1], [-1.0], wrong), lambda: Store(writer.path).get([1], wrong)):
        with pytest.raises(ConfigError, match="unknown kind of record 'refrence'; did you mean 'reference'"):
            use()


def test_a_file_that_is_absent_or_no_store_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    with pytest.raises(ConfigError, match="rl.toml: there is no store; write one with StoreWriter"):
        Store(path)
    path.write_text("[trainer.loss]\n" * 1000)
    for use in (lambda: Store(path).get([1], "reference"), lambda: StoreWriter(path)):
        with pytest.raises(DataError, match="rl.toml: it cannot be read or written as a store"):
            use()
    assert path.read_text().startswith("[trainer.loss]")
