"""The file of teachers: what it may contain, and one sentence for everything else."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.trace_replay.request import Client, client_of
from composer_plugins.recipes.trace_replay.teachers import load_teachers
from parity_tests.rigs.paths import ROOT

ENTRY = {
    "name": "qwen",
    "model": "Qwen/Qwen3-32B",
    "base_url": "http://localhost:8000/v1",
    "usd_per_million_input": 0,
    "usd_per_million_output": 0.5,
    "max_tokens": 100,
}


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "teachers.yaml"
    path.write_text(yaml.safe_dump({"teachers": list(entries)}))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_teachers(path)
    return str(refused.value)


def test_a_file_of_teachers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", " abc\n")
    second = {"name": "b", "api_key_env": "THE_KEY", "params": {"temperature": 0.7}}
    second |= {"max_tokens": None, "max_completion_tokens": 7}
    first, other = load_teachers(written(tmp_path, ENTRY, ENTRY | second))
    assert first.usd(1_000_000, 2_000_000) == 1.0
    assert first.limit() == {"max_tokens": 100}
    assert (client_of(other, Client()).api_key, other.limit()) == ("abc", {"max_completion_tokens": 7})
    assert first.api_key() and "abc" not in repr(other)


def test_the_example_in_the_readme_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", "abc")
    path = tmp_path / "teachers.yaml"
    _, example = (ROOT / "recipes/trace_replay/README.md").read_text().split("```yaml\n")
    path.write_text(example.partition("```")[0])
    local, other = load_teachers(path)
    assert local.usd(1, 1) == 0 and other.params == {"temperature": 0.7}


PRICE, OUTPUT = "usd_per_million_input", "usd_per_million_output"
LIMITS = "max_tokens: an entry has either max_tokens or max_completion_tokens; set one"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({PRICE: None}, f"{PRICE}: it is None; set a valid number"),
    ({OUTPUT: float("nan")}, f"{OUTPUT}: it is nan; set a finite number"),
    ({"max_tokens": None}, LIMITS),
    ({"max_completion_tokens": 5}, LIMITS),
    ({"modle": "x"}, "modle: unknown option 'modle'; did you mean 'model'?"),
    ({"base_url": "localhost:8000"}, "base_url: it is 'localhost:8000'; "),
    ({"timeout": 0}, "timeout: it is 0; set a number greater than 0"),
    ({"params": {"n": 4}}, "params.n: the recipe writes this key of a request itself; remove it"),
]


@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_a_wrong_entry_is_one_sentence_with_its_key(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    assert refusal(written(tmp_path, ENTRY, ENTRY | change)).startswith(f"teachers[1].{problem}")


def test_a_price_must_be_written_out_and_0_is_one(tmp_path: Path) -> None:
    entry = {name: value for name, value in ENTRY.items() if name != PRICE} | {"prices": None}
    remedy = "add it to the entry; a price is in USD per million tokens, and 0 for a local server"
    assert refusal(written(tmp_path, entry)) == f"teachers[0].{PRICE}: it is missing; {remedy}"


def test_a_list_of_teachers_has_at_least_one_and_each_name_once(tmp_path: Path) -> None:
    assert refusal(written(tmp_path)) == "teachers: the list is empty; add at least one teacher"
    expected = "teachers: 2 teachers have the name 'qwen'; give each teacher its own name"
    assert refusal(written(tmp_path, ENTRY, ENTRY | {"model": "other"})) == expected


@pytest.mark.parametrize("value", [None, "", " \n"])
def test_a_key_that_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("THE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("THE_KEY", value)
    said = refusal(written(tmp_path, ENTRY | {"api_key_env": "THE_KEY"}))
    assert said.startswith("teacher 'qwen', api_key_env: the environment variable THE_KEY is not set; ")


@pytest.mark.parametrize("value", ["sk-1\n23", "sk-é", "sk-\x7f"])
def test_a_key_that_no_header_can_have_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("THE_KEY", value)
    said = refusal(written(tmp_path, ENTRY | {"api_key_env": "THE_KEY"}))
    problem = "the environment variable THE_KEY has a line break, or a character that is not ASCII"
    assert said == f"teacher 'qwen', api_key_env: {problem}; set the variable to the key alone"


NO_LIST = "has no list of teachers; begin the file with `teachers:`"
NO_TEACHERS = [
    (None, "cannot be read (FileNotFoundError: "),
    ("teachers: [", "cannot be read (ParserError: "),
    ("\udcff", "cannot be read (UnicodeDecodeError: "),
    ("teachers: [qwen]", NO_LIST),
    ("", NO_LIST),
    ("teachers:\n", NO_LIST),
]


@pytest.mark.parametrize(("text", "problem"), NO_TEACHERS)
def test_a_file_that_is_none(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "teachers.yaml"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    assert refusal(path).startswith(f"--teachers: {path} {problem}")
    assert "\n" not in refusal(path)
