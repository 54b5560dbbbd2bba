"""The parts of the demo: the codebook task, what a run is, the files, the picture, the progress."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from composer_plugins.errors import ConfigError
from composer_plugins.recipes import shared
from composer_plugins.recipes.codebook import curves, demo, options, report, run, task
from composer_plugins.recipes.codebook.options import Settings
from composer_plugins.recipes.codebook.progress import Progress

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


def test_an_interrupt_between_a_run_and_its_file_still_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: run.Start
) -> None:
    write, calls = demo.write_results, []

    def interrupt_the_first(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(demo, "make_start", lambda seed: start)
    monkeypatch.setattr(demo, "train", lambda *_: finished())
    monkeypatch.setattr(demo, "write_results", interrupt_the_first)
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo([("rl",), ALL], [0], Settings(steps=12), tmp_path, console)
    assert console.file.getvalue().endswith("interrupted: 1 of 2 runs had finished\n")
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 1


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


def test_a_line_of_the_picture_ends_at_the_final_reward() -> None:
    one = finished(rewards=30)
    assert curves.smooth(one.rewards)[-1] == one.final_reward == pytest.approx(24.5 / 30)
    assert curves.smooth(one.rewards)[0] == one.start_reward


def test_every_set_of_channels_has_a_colour_of_its_own(tmp_path: Path) -> None:
    sets = options.parse_runs(["rl,hint,replay,rl+hint,rl+replay,hint+replay,rl+hint+replay"])
    assert len({curves.COLOURS[channels] for channels in sets}) == len(sets) == 7
    curves.draw_curves(tmp_path, [finished(channels, seed) for channels in sets for seed in (0, 1)])
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_sparkline_has_a_bar_for_each_part_of_the_steps() -> None:
    assert report.sparkline([0.0, 1.0]) == "▁█"
    assert report.sparkline([0.5] * 250) == "▅" * report.CURVE_WIDTH
    assert report.sparkline([0.0] * 100 + [1.0] * 50) == "▁" * 9 + "▆" + "█" * 4


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_has_step_reward_and_time_left(is_terminal: bool) -> None:
    console = Console(force_terminal=is_terminal, width=100, file=io.StringIO())
    plan: list[tuple[options.Channels, int]] = [(("rl",), 0), (ALL, 0)]
    with Progress(plan, 5, console) as progress:
        progress.bars.get_time = lambda: 2.0 * progress.bars.tasks[-1].completed
        progress.start(0)
        for step in (1, 2, 3):
            progress.step(step, 0.25)
        left = progress.bars.tasks[progress.all].time_remaining
        progress.bars.refresh()
    text = console.file.getvalue()
    assert "step 3 of 5, reward 0.25" in text
    # 2 more steps of RL at 2 s, and 5 of all channels, each of which costs 2.5 as much.
    assert left == 29
    assert ("0:00:29 left" in text) is not is_terminal and ("\x1b" in text) is is_terminal
