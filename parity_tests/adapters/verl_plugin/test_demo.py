"""What `make demo-verl` shows, of a run that was recorded, one that failed and one that was cut off."""

import signal
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from composer_plugins.recipes.verl.on_a_cpu import demo, showing
from composer_plugins.recipes.verl.on_a_cpu.runner import Run

RECORDED = {  # the first step, as verl logged it
    "critic/rewards/mean": 0.37461,
    "actor/pg_loss": -0.12172,
    "actor/composer/hint/loss": 0.12110,
    "actor/composer/replay/loss": 0.69315,
    "actor/composer/replay/rewards/margins": 0.0,
    "actor/composer/replay/rewards/accuracies": 0.0,
    "timing_s/step": 12.9,
}
LATER = RECORDED | {
    "critic/rewards/mean": 0.58,
    "actor/composer/replay/rewards/margins": 3.27,
    "actor/composer/replay/rewards/accuracies": 1.0,
}
Shown = Callable[[Any], tuple[int, str]]
STEPS = [RECORDED, *[LATER] * (demo.STEPS - 1)]


def ended(code: int | None, steps: list[dict[str, Any]], log: str = "", left: list[str] | None = None) -> Run:
    return Run(code, log, steps, [], 101.4, [], left or [])


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The folder a temporary one, and the handlers of signals as they were."""
    monkeypatch.setattr(demo, "OUT", tmp_path)
    monkeypatch.setattr(showing, "missing", lambda: "")
    monkeypatch.setenv("COLUMNS", "80")
    kept = {number: signal.getsignal(number) for number in showing.SIGNALS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def shown_by(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Status and output of a demo whose training is a function, or ends with a run."""

    def shown(run: Any) -> tuple[int, str]:
        monkeypatch.setattr(demo, "train", run if callable(run) else lambda *_: run)
        return demo.main([]), capsys.readouterr().out

    return shown


def printed(table: Table) -> list[list[str]]:
    """The words of each row, on 80 columns; where they are not enough a number is cut, and missed here."""
    console = Console(width=80, record=True, file=StringIO())
    console.print(table)
    lines = [line.split() for line in console.export_text().splitlines()]
    return [line for line in lines if line[:1] and line[0].isdigit()]


def test_the_table_has_a_row_a_step_and_the_columns_of_the_channels_that_are_on() -> None:
    """What verl did not log in a step is a dash."""
    first, last = printed(showing.table([{"timing_s/step": 1.0}, LATER], demo.TITLE))
    assert first == ["1", *"------", "1", "s"]
    assert last[:7] == ["2", "0.580", "-0.122", "0.1211", "0.693", "+3.270", "100%"]
    without = {key: value for key, value in RECORDED.items() if "replay" not in key}
    assert printed(showing.table([without], demo.TITLE)) == [["1", "0.375", "-0.122", "0.1211", "13", "s"]]


@pytest.mark.parametrize(
    ("log", "steps", "stage"),
    [
        ("", 0, "making the files of the run and starting verl"),
        ("ray init kwargs: {}\nStarted a local Ray instance.", 0, "starting verl's workers"),
        ("Total training steps: 8", 0, "loading the model as actor, reference and rollout"),
        ("Total training steps: 8\nTraining Progress: 0%", 0, "training, step 1 of 8"),
        ("Training Progress: 12%", 1, "training, step 2 of 8, reward 0.375"),
        ("Training Progress: 100%", 8, "stopping Ray"),
    ],
)
def test_the_line_says_how_far_a_run_is(log: str, steps: int, stage: str) -> None:
    assert showing.stage(log, STEPS[:steps], demo.STEPS) == stage


def test_a_run_that_ended_well_shows_the_table_and_where_the_log_is(shown_by: Shown) -> None:
    code, shown = shown_by(ended(0, STEPS))
    assert code == 0 and "Reward" in shown and f"101 s; verl's log: {demo.OUT}/main_ppo.log" in shown


def test_a_run_that_failed_shows_its_error_and_the_end_of_its_log(shown_by: Shown) -> None:
    log = "\n".join(["ConfigError: algorithm.composer: [no] such", *(f"line {i}" for i in range(40))])
    code, shown = shown_by(ended(1, [], log))
    assert code == 1 and "main_ppo ended with exit status 1" in shown
    assert "ConfigError: algorithm.composer: [no] such" in shown
    assert "line 39" in shown and "line 24" not in shown


@pytest.mark.parametrize("run", [ended(0, STEPS[:3]), ended(None, STEPS), ended(0, STEPS, left=["raylet"])])
def test_a_run_that_is_not_whole_is_a_failure(shown_by: Shown, run: Run) -> None:
    code, shown = shown_by(run)
    assert code == 1 and ("raylet" in shown) == bool(run.left)


def test_ctrl_c_ends_a_run_once_and_says_so(shown_by: Shown) -> None:
    """The second one, while the processes are killed, is not heard."""

    def interrupted(*_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    code, shown = shown_by(interrupted)
    assert code == 130 and "interrupted after 0 s; verl and Ray are stopped" in shown
