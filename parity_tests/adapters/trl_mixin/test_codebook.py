"""The parts of the demo: the codebook task, what a run is, the files, the table."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes import shared
from composer_plugins.recipes.codebook import demo, options, report, run, task
from composer_plugins.recipes.codebook.options import Settings

ALL = ("rl", "hint", "replay")


@pytest.fixture(scope="module")
def start() -> run.Start:
    return run.make_start(0)


def finished(channels: options.Channels = ("rl",), seed: int = 0, rewards: int = 12) -> run.Run:
    return run.Run(channels, seed, [i / rewards for i in range(rewards)], 0.1, 0.9, 1.0)


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
        if row["chosen"] is None:
            assert row["rejected"] is None and row["n_teachers_agreeing"] is None
            continue
        # A row with more pairs than generations would be refused.
        assert 1 <= len(row["chosen"]) == len(row["rejected"]) <= Settings().num_generations
        for chosen, rejected in zip(row["chosen"], row["rejected"], strict=True):
            assert task.score(chosen, row["answer"]) > task.score(rejected, row["answer"])
        for agreeing in row["n_teachers_agreeing"]:
            assert agreeing in range(1, len(task.TEACHER_SKILLS) + 1 - len(row["rejected"]))
    assert any(row["n_teachers_agreeing"] == [3, 3] for row in rows)


def test_teachers_who_do_equally_well_leave_no_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "TEACHER_SKILLS", (1.0, 1.0))
    assert {row["chosen"] for row in task.codebook_rows(0)} == {None}


def test_warm_up_teaches_to_copy_a_hint_and_no_answer(start: run.Start) -> None:
    hinted = [{**row, "prompt": row["prompt"] + row["privileged_context"]} for row in start.rows]
    assert task.greedy_accuracy(start.model, start.tokenizer, hinted) > 0.95
    assert task.greedy_accuracy(start.model, start.tokenizer, start.rows) < 0.2


def test_a_run_has_exactly_its_channels_on(tmp_path: Path) -> None:
    for channels in [("rl",), ("hint",), ("replay",), ("rl", "replay"), ALL]:
        config = run.trainer_config(channels, 0, Settings(), str(tmp_path))
        weights = (config.policy_weight, config.hint_weight, config.replay_weight)
        assert tuple(c for c, weight in zip(ALL, weights, strict=True) if weight > 0) == channels


@pytest.mark.slow
def test_hints_and_replays_teach_what_reward_alone_does_not(start: run.Start) -> None:
    """60 of the demo's 250 steps, at its own setting."""
    settings = Settings(steps=60)
    rewards = {c: run.train(c, start, settings, lambda *_: None) for c in [("rl",), ALL]}
    assert rewards["rl",].start_reward == rewards[ALL].start_reward < 0.15
    assert rewards["rl",].final_reward < 0.4
    assert rewards[ALL].final_reward > 0.5
    assert rewards[ALL].greedy_after > rewards[ALL].greedy_before + 0.3


def test_channels_are_put_in_order_and_run_once() -> None:
    parsed = options.parse_runs(["hint+rl, RL", "rl+hint", "replay"])
    assert parsed == [("rl", "hint"), ("rl",), ("replay",)]
    assert [options.key_of(c) for c in parsed] == ["rl+hint", "rl", "replay"]
    assert [options.title_of(c) for c in parsed] == ["RL + hint", "RL", "replay"]
    assert options.parse_seeds(["3,0", "3"]) == [3, 0]


def test_an_early_interrupt_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "make_start", interrupt)
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo([("rl",)], [0], Settings(steps=1), tmp_path, console)
    assert console.file.getvalue().endswith("interrupted: 0 of 1 runs had finished\n")
    assert list(tmp_path.iterdir()) == []


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


def test_the_table_of_several_seeds_fits_80_columns() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(report.results_table([finished(ALL, seed) for seed in (0, 10)], draws_bars=True))
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("RL + hint + replay") == 2
