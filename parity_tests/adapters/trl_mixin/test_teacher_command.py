"""`composer-plugins teacher` on a real tokenizer, chat template, model and trainer."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parity_tests.rigs import tiny
from parity_tests.rigs.commands import error, invoke

OPTIONS = ["--rows", "3", "--samples", "2", "--max-new-tokens", "3", "--template", "default"]
CODE = """
def digits(completions, **columns):
    assert set(columns) >= {"prompts", "completion_ids", "privileged_context"}
    return [float(str(one)[-3:].count("1")) for one in completions]

def make_trainer():
    from parity_tests.rigs import tiny
    made = tiny.trainer(hint_weight=1.0, scripted=False)
    made.reward_funcs = [digits]
    return made

def make_nothing():
    raise OSError("no model here")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model, rows and rewards, as a user has them."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny.rows()))
    (tmp_path / "teacher_rewards.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("teacher_rewards", None)


def test_files_and_a_trainer_of_the_same_rows_measure_the_same(folder: Path) -> None:
    named = {"model": folder / "model", "data": folder / "rows.jsonl", "reward": "teacher_rewards:digits"}
    files = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    by_files = invoke("teacher", *files, *OPTIONS, "--json")
    by_trainer = invoke("teacher", "--trainer", "teacher_rewards:make_trainer", *OPTIONS, "--json")
    assert by_files.exit_code in (0, 1), by_files.output
    one, other = (json.loads(found.stdout) for found in (by_files, by_trainer))
    assert one["measured"] == [pytest.approx(row) for row in other["measured"]]
    assert one["measured"][1]["shown"] == 1 and one["measured"][1]["forward_kl"] > 0
    printed = invoke("teacher", *files, *OPTIONS)
    assert printed.exit_code == by_files.exit_code == (one["best"] is None)
    assert f"{one['measured'][1]['forward_kl']:.3f}" in printed.stdout
    controlled = json.loads(invoke("teacher", *files, *OPTIONS, "--control", "--json").stdout)["measured"]
    assert [{k: row[k] for k in one["measured"][0]} for row in controlled[:2]] == one["measured"]
    assert [row["control"] for row in controlled[2:]] == ["wrong hint", "unrelated example"]
    assert one["measured"][1]["better"] is None and controlled[2]["better"] is not None
    said = invoke("teacher", *files, *OPTIONS, "--control").stdout
    assert "more than this control" in said and "this control" not in printed.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nowhere/at/all"], "--data: it is missing"),
        (
            ["--model", "nowhere/at/all", "--data", "rows.txt", "--reward", "teacher_rewards:digits"],
            "--model: ",
        ),
        (["--trainer", "teacher_rewards:make_nothing"], "no model here"),
        (["--trainer", "teacher_rewards:digits", "--model", "x"], "--trainer: it has a model"),
    ],
)
def test_what_cannot_be_loaded_is_one_error(folder: Path, words: list[str], said: str) -> None:
    assert said in error("teacher", *words)
