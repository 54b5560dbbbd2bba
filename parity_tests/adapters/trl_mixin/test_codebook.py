"""The parts of the demo: the codebook task, its options, and the files."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes import shared
from composer_plugins.recipes.codebook import demo, options, task
from composer_plugins.recipes.codebook.options import Settings


def test_the_verifier_wants_the_length_and_counts_right_digits() -> None:
    assert [task.score(text, "47") for text in ("47", "41", "74", "4", "477", "")] == [1, 0.5, 0, 0, 0, 0]


def test_a_completion_that_does_not_end_scores_nothing() -> None:
    ids = task.make_tokenizer()("47")["input_ids"]
    rewards = task.codebook_reward(["47", "47"], [[*ids, task.EOS_ID], ids], ["47", "47"])
    assert rewards == [1.0, 0.0]


def test_rows_pair_the_best_trace_with_worse_ones() -> None:
    rows = task.codebook_rows(0)
    assert rows == task.codebook_rows(0) != task.codebook_rows(1)
    assert len(rows) == len(task.KEYS) * task.REPLAYS
    assert len({(row["prompt"], row["answer"]) for row in rows}) == len(task.KEYS)
    for row in rows:
        assert row["privileged_context"] == f"[{row['answer']}]"
        # A row with more pairs than generations would be refused.
        assert 1 <= len(row["chosen"]) == len(row["rejected"]) <= Settings().num_generations
        for chosen, rejected in zip(row["chosen"], row["rejected"], strict=True):
            assert task.score(chosen, row["answer"]) > task.score(rejected, row["answer"])
        for agreeing in row["n_teachers_agreeing"]:
            assert agreeing in range(1, len(task.TEACHER_SKILLS) + 1 - len(row["rejected"]))
    assert any(row["n_teachers_agreeing"] == [3, 3] for row in rows)


def test_teachers_who_do_equally_well_leave_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "TEACHER_SKILLS", (1.0, 1.0))
    for row in task.codebook_rows(0):
        assert [row[name] for name in ("chosen", "rejected", "n_teachers_agreeing")] == [None] * 3


def test_channels_are_put_in_order_and_run_once() -> None:
    parsed = options.parse_runs(["hint+rl, RL", "rl+hint", "replay"])
    assert parsed == [("rl", "hint"), ("rl",), ("replay",)]
    assert [options.key_of(c) for c in parsed] == ["rl+hint", "rl", "replay"]
    assert [options.title_of(c) for c in parsed] == ["RL + hint", "RL", "replay"]
    assert options.parse_seeds(["3,0", "3"]) == [3, 0]


def test_a_wrong_config_is_told_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(channels: options.Channels, *_: object, **__: object) -> None:
        if channels == ("replay",):
            raise ConfigError("replay_weight", "not available", "set it to 0")

    monkeypatch.setattr(demo, "trainer_config", refuse)
    monkeypatch.setattr(demo, "make_start", lambda seed: pytest.fail("training started"))
    with pytest.raises(ConfigError, match="not available"):
        demo.run_demo([("rl",), ("replay",)], [0], Settings(), tmp_path, Console(file=io.StringIO()))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    shared.replace_file(file, lambda path: path.write_text("first"))

    def break_off(path: Path) -> None:
        path.write_text("sec")
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left on device"):
        shared.replace_file(file, break_off)
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
