"""`composer-plugins demo` as a stranger runs it, and the recipe: short, real trainings in processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_plugins import cli
from composer_plugins.recipes import shared
from parity_tests.rigs.commands import error, output
from parity_tests.rigs.paths import ROOT

COMMAND = [sys.executable, "-c", "from composer_plugins.cli import main; main()", "demo"]
CHANNELS = ["rl", "rl+hint+replay"]
STEPS = 4

Demo = tuple[Path, str, str]  # folder, stdout, stderr


def start_demo(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores Ctrl-C, and hands that on to the tests and to their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    options = ("--channels", ",".join(CHANNELS), "--steps", str(STEPS), "--out", str(folder))
    process = start_demo(*options)
    printed = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    return folder, *printed


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line in this process ends where it would train."""
    from composer_plugins.recipes.codebook import demo

    monkeypatch.setattr(demo, "run_demo", lambda *_: None)


def test_results_hold_every_run(demo: Demo) -> None:
    results = json.loads(text := (demo[0] / "results.json").read_text())
    assert str(demo[0]) not in text
    assert list(results) == ["settings", "versions", "runs", "timing"]
    assert results["settings"]["steps"] == STEPS
    assert [run["channels"] for run in results["runs"]] == CHANNELS
    for run in results["runs"]:
        rewards = run["rewards"]
        assert len(rewards) == STEPS
        assert all(0 <= reward <= 1 for reward in rewards)
        assert run["start_reward"] == rewards[0]
        assert run["final_reward"] == pytest.approx(sum(rewards) / STEPS, abs=1e-5)  # fewer than 10 steps
        assert 0 <= run["greedy_after"] <= 1
    # Both start from one model, and sample their first completions alike: the numbers of docs/get_started.md.
    for name, promised in (("start_reward", 0.05), ("greedy_before", 0.06)):
        first, second = (run[name] for run in results["runs"])
        assert first == second == pytest.approx(promised, abs=0.03)
    assert results["runs"][0]["rewards"] != results["runs"][1]["rewards"]
    assert len(results["timing"]["run_seconds"]) == len(CHANNELS)


@pytest.mark.slow
def test_a_run_does_not_depend_on_those_before_it_or_the_hash_seed(demo: Demo) -> None:
    """This process has a random hash seed; the demo's is 0."""
    from composer_plugins.recipes.codebook import run
    from composer_plugins.recipes.codebook.options import Settings

    alone = run.train(("rl", "hint", "replay"), run.make_start(0), Settings(steps=STEPS), lambda *_: None)
    second = json.loads((demo[0] / "results.json").read_text())["runs"][1]
    assert [round(reward, 6) for reward in alone.rewards] == second["rewards"]
    assert round(alone.greedy_after, 6) == second["greedy_after"]


def test_without_a_terminal_the_demo_prints_plain_lines(demo: Demo) -> None:
    folder, stdout, stderr = demo
    assert stderr == ""
    assert "\x1b" not in stdout and "\r" not in stdout
    assert f"RL + hint + replay: step {STEPS} of {STEPS}, reward 0." in stdout
    assert all(len(line) <= 80 for line in stdout.splitlines() if str(folder) not in line)
    assert f"wrote {folder / 'results.json'} and {folder / 'curves.png'}" in stdout
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "results.json"]


@pytest.mark.slow
def test_ctrl_c_leaves_the_finished_runs_and_says_so(tmp_path: Path) -> None:
    demo = start_demo("--channels", "rl,rl+hint", "--steps", "40", "--out", str(tmp_path))
    assert demo.stdout is not None
    for line in iter(demo.stdout.readline, ""):
        if line.startswith("RL + hint: step 8"):
            demo.send_signal(signal.SIGINT)
            break
    stdout, stderr = demo.communicate(timeout=120)
    assert demo.returncode == 130, stderr
    assert stderr == ""
    assert stdout.rstrip().endswith("interrupted: 1 of 2 runs had finished")
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [(run["channels"], len(run["rewards"])) for run in runs] == [("rl", 40)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "results.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--channels", "rl,rl+hnt"], "--channels: unknown channel 'hnt'; did you mean 'hint'?"),
        (["--teacher", "bse"], "hint_teacher: unknown value 'bse'; did you mean 'base'?"),
        (["--policy", "gropo"], "policy: unknown policy loss 'gropo'; did you mean 'grpo'?"),
        (["--seeds", "0,one"], "--seeds: it has 'one'; set whole numbers below 2**32: --seeds 0,1,2"),
        (["--seeds", "-1"], "--seeds: it has '-1'; set whole numbers below 2**32: --seeds 0,1,2"),
    ],
)
def test_a_wrong_name_is_an_error_before_training(tmp_path: Path, options: list[str], message: str) -> None:
    assert error("demo", *options, "--out", str(tmp_path / "out")) == message
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # root may write anywhere, but not into a file
    out = str(tmp_path / "file" / "out")
    assert error("demo", "--out", out).startswith(f"--out: {out!r} cannot be written (Not a directory)")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared, "find_spec", lambda name: None if name == "matplotlib" else object())
    problem = (
        "demo: it needs matplotlib, which is not installed here; run pip install 'composer-plugins[demo]'"
    )
    assert error("demo", "--out", str(tmp_path)).startswith(problem)


@pytest.mark.parametrize(("channels", "warnings"), [("rl,rl+hint", 1), ("rl,rl+replay", 0)])
def test_a_live_teacher_is_a_warning_with_hints(tmp_path: Path, channels: str, warnings: int) -> None:
    said = output("demo", "--teacher", "live", "--channels", channels, "--out", str(tmp_path))
    assert said.count("collapsed to reward 0 in 3 of 3 measured seeds") == warnings


def test_version() -> None:
    assert output("--version") == f"composer-plugins {cli.__version__}\n"


@pytest.mark.slow
def test_the_recipe_runs_as_its_readme_says(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "trl"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu"]
    options = ["--max_steps", "2", "--logging_steps", "1", "--output_dir", str(tmp_path)]
    run = subprocess.run(
        [*launch, str(recipe / "train.py"), "--config", str(recipe / "three_channels.yaml"), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("composer/hint/loss") == run.stdout.count("composer/replay/loss") == 2
    assert run.stderr.count("composer loss = 1 * policy TRL's own, loss_type=dapo + 4 * hint jsd(") == 1
    assert "reward: 0." in run.stdout
    assert (tmp_path / "model.safetensors").exists()
