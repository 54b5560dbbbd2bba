"""--pairs: a file of trace_replay's in the rows of a task."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from composer_plugins.columns import pairs_of
from composer_plugins.errors import ConfigError
from composer_plugins.recipes.smollm.__main__ import app
from composer_plugins.recipes.smollm.asking import Settings
from composer_plugins.recipes.smollm.comparing import Comparison
from composer_plugins.recipes.smollm.over_http import LOG, write_pairs
from composer_plugins.recipes.smollm.pairs_file import read_pairs
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, make_task

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The pairs of the recorded log."""
    shutil.copy(RECORDED / LOG, tmp_path)
    write_pairs(tmp_path)
    return tmp_path / "pairs" / "pairs.parquet"


def test_each_pair_is_in_the_row_of_its_question(file: Path) -> None:
    task = make_task(ARITHMETIC)
    made = read_pairs(file, task)
    expected = {one["question"]: one for one in json.loads((RECORDED / "pairs.json").read_text())}
    assert sum(row["chosen"] is not None for row in made.rows) == len(expected)
    for row, own in zip(made.rows, task.rows, strict=True):
        assert {name: row[name] for name in own} == own
        pair = expected.get(row["prompt"][-1]["content"])
        texts = [(pair["chosen"], pair["rejected"])] if pair else []
        assert [one.texts for one in pairs_of(row)] == texts


def test_a_prompt_may_have_several_pairs_with_weights(file: Path) -> None:
    rows = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([rows[0], {**rows[0], "n_teachers_agreeing": 3}]), file)
    (row,) = [one for one in read_pairs(file, make_task(ARITHMETIC)).rows if one["chosen"]]
    assert [pair.weight for pair in pairs_of(row)] == [1, 3]


def changed(file: Path, **columns: Any) -> None:
    """Write the file with other values in its first row."""
    first, *others = pq.read_table(file).to_pylist()
    pq.write_table(pa.Table.from_pylist([{**first, **columns}, *others]), file)


def test_pairs_of_other_prompts_are_an_error(file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_pairs(file, make_task("chain_sum"))
    said = f"11 of 11 prompts in {file} are no questions that the task chain_sum trains, the first is "
    assert (error.value.key, error.value.problem) == ("--pairs", f"{said}'What is 35 + 32?'")
    task = make_task(ARITHMETIC)
    changed(file, prompt=[{**one, "tool_calls": None} for one in task.held_out[0]["prompt"]])
    with pytest.raises(ConfigError, match="^--pairs: 1 of 11 prompts in .* that the task arithmetic trains"):
        read_pairs(file, task)


def test_a_file_without_pairs_is_an_error(file: Path, tmp_path: Path) -> None:
    task, rows = make_task(ARITHMETIC), pq.read_table(file)
    tables = {
        "no rows": rows.slice(0, 0),
        "no rejected": rows.drop_columns(["rejected"]),
        "a text": rows.set_column(0, "prompt", pa.array(["What is 35 + 32?"] * len(rows))),
        "empty": rows.set_column(1, "chosen", pa.array([[{"role": "assistant", "content": ""}]] * len(rows))),
    }
    for name, table in tables.items():
        pq.write_table(table, tmp_path / name)
    for name in (*tables, LOG, "missing", "."):
        with pytest.raises(ConfigError, match="^--pairs: .* has no pairs.*; give the pairs.parquet"):
            read_pairs(tmp_path / name, task)


def test_only_runs_with_replay_depend_on_the_file(file: Path) -> None:
    task = make_task(ARITHMETIC)
    without, with_file = (
        Comparison("SmolLM2", Any, task, Settings(), file, paired)  # type: ignore[arg-type]
        for paired in (None, read_pairs(file, task))
    )
    assert without.conditions(("rl",)) == with_file.conditions(("rl",)) == without.conditions(("replay",))
    before = with_file.conditions(("rl", "replay"))
    assert before == {**without.conditions(("rl",)), "pairs": read_pairs(file, task).digest}
    changed(file, n_teachers=7)
    assert before["pairs"] != read_pairs(file, task).digest


def test_a_file_that_no_run_uses_is_an_error(file: Path, tmp_path: Path) -> None:
    words = ["--pairs", str(file), "--channels", "rl,rl+hint", "--out", str(tmp_path)]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError) and error.key == "--pairs" and "--channels" in error.problem
