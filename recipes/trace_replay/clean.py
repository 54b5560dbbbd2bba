"""Cleaning: data-juicer's operators decide which rows of `pairs.parquet` or `states.jsonl` stay.

The operators read texts that are made of each row. A row that stays is written as it was.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import Field, TypeAdapter, ValidationError

from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.recipes.shared import replace_file
from composer_plugins.recipes.trace_replay.states import read_states, text_of, write_text

MESSAGES = {".parquet": ("prompt", "chosen", "rejected"), ".jsonl": ("messages", "observed")}
ROW = "__row__"  # the column with the number of a row, from 0
DROPPED = ".dropped.json"  # the suffix of the report
ENTRIES = TypeAdapter(list[Annotated[dict[str, dict[str, Any] | None], Field(min_length=1, max_length=1)]])
Operators = list[tuple[str, dict[str, Any]]]  # names and parameters


def load_recipe(path: Path) -> Operators:
    """The operators of a data-juicer recipe, a YAML file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read ({in_a_line(error)})"
        raise ConfigError("--recipe", problem, "name a YAML file of data-juicer") from None
    process = data.get("process") if isinstance(data, dict) else None
    if not isinstance(process, list) or not process:
        remedy = "begin the file with `process:` and a list of operators"
        raise ConfigError("--recipe", f"{path} has no list of operators", remedy)
    if others := [str(key) for key in data if key != "process"]:
        problem = "data-juicer's own command reads this key, and `clean` only runs the operators"
        raise ConfigError(others[0], problem, "remove it from the recipe")
    try:
        entries = ENTRIES.validate_python(process)
    except ValidationError as error:
        i = int(error.errors()[0]["loc"][0])
        remedy = "write `- name:`, and its parameters indented below"
        raise ConfigError(f"process[{i}]", f"{process[i]!r} is not one operator", remedy) from None
    return [(name, parameters or {}) for entry in entries for name, parameters in entry.items()]


def clean(path: Path, recipe: Path, out: Path) -> dict[str, Any]:
    """Write the rows that all operators keep; return, and write next to them, what each operator dropped.

    Nothing is written if no row is left.
    """
    if path.suffix not in MESSAGES or out.suffix != path.suffix:
        problem = f"{path} and {out} are not two files *.parquet or two files *.jsonl"
        raise ConfigError("PAIRS and --out", problem, "name pairs.parquet or states.jsonl")
    operators, is_states = load_recipe(recipe), path.suffix == ".jsonl"
    rows: Any = read_states(path) if is_states else _read_table(path)
    dicts = [vars(state) for state in rows] if is_states else rows.to_pylist()
    if not dicts:
        raise DataError(str(path), "it has no row", "run the command again that writes it")
    texts = [texts_of(i, row, MESSAGES[path.suffix]) for i, row in enumerate(dicts)]
    with _quiet() as warnings:
        import data_juicer

        dropped = run_operators(operators, texts)
    left = sorted({*range(len(dicts))}.difference(*dropped))
    report = {
        "data-juicer": data_juicer.__version__,
        "rows": len(dicts),
        "left": len(left),
        "operators": [
            {"operator": name, "parameters": parameters, "dropped rows": numbers}
            for (name, parameters), numbers in zip(operators, dropped, strict=True)
        ],
        "warnings": warnings,
    }

    def write(partial: Path) -> None:
        """Write the rows and the report, before the rows get their name."""
        if is_states:
            partial.write_text(text_of(rows[i] for i in left), encoding="utf-8")
        else:
            pq.write_table(rows.take(pa.array(left)), partial)
        write_text(out.with_suffix(DROPPED), json.dumps(report, default=str, indent=1) + "\n")

    if left:
        replace_file(out, write)
    return report


def _read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        problem = f"{path} cannot be read ({in_a_line(error)})"
        raise ConfigError("PAIRS", problem, "name the file of the command `pairs`") from None


def texts_of(number: int, row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A row as operators read it: its messages as texts, all of them as `text`, and the other columns."""
    texts = dict[str, str]()
    for name in names:
        try:
            texts[name] = as_text(row[name])
        except (TypeError, AttributeError, KeyError):
            problem = f"row {number} has no messages in {name}"
            raise DataError("PAIRS", problem, "name pairs.parquet or states.jsonl") from None
    plain = {name: value for name, value in row.items() if isinstance(value, str | int | float | None)}
    others = {name: value for name, value in plain.items() if not name.startswith("__")}
    return others | texts | {ROW: number, "text": "\n".join(texts.values())}


def as_text(messages: Any) -> str:
    """The contents of one or several messages, and their tool calls: the name and then the arguments."""
    parts = []
    for message in [messages] if isinstance(messages, dict) else messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parts += [message["content"] or "", *(f"{call['name']} {call['arguments']}" for call in calls)]
    return "\n".join(part for part in parts if part)


def run_operators(operators: Operators, texts: list[dict[str, Any]]) -> list[list[int]]:
    """Run each operator on the rows that the ones before it left; return the rows that each drops.

    Each gets a data set without statistics. data-juicer's filters do not compute again what is there, so the
    length of `prompt` would count as the length of `chosen` too.
    """
    from data_juicer.core import preflight
    from data_juicer.core.data import NestedDataset
    from data_juicer.ops import OPERATORS, Deduplicator, Filter, Selector, load_ops
    from datasets import Dataset

    try:
        preflight.pre_instantiation_check([{name: parameters} for name, parameters in operators])
        for name, _ in operators:
            if not issubclass(OPERATORS.modules[name], (Filter, Deduplicator, Selector)):
                remedy = "use filters, deduplicators and selectors"
                raise ConfigError(name, "it changes texts, and `clean` only drops rows", remedy)
        loaded = []
        for name, parameters in operators:
            with _naming(name):  # in this process, or data-juicer would start one for each core
                loaded += load_ops([{name: {"auto_op_parallelism": False} | parameters}])
        preflight.post_instantiation_check(loaded, NestedDataset(Dataset.from_list(texts[:1])).schema())
    except (preflight.PipelineConfigError, preflight.PipelineRuntimeError) as error:
        problem = "; ".join(map(str, error.errors))
        raise ConfigError("process", problem, "data-juicer's docs/Operators.md has all operators") from None
    dropped, left = list[list[int]](), list(range(len(texts)))
    for operator, (name, _) in zip(loaded, operators, strict=True):
        with _naming(name):
            kept = operator.run(Dataset.from_list([texts[i] for i in left])).to_list() if left else []
        numbers = {row[ROW] for row in kept}
        before_and_now = [(text, row.get(key)) for row in kept for key, text in texts[row[ROW]].items()]
        if len(numbers) < len(kept) or any(a != b for a, b in before_and_now if isinstance(a, str)):
            raise ConfigError(name, "it changed or repeated rows, and `clean` only drops rows", "remove it")
        dropped.append([i for i in left if i not in numbers])
        left = sorted(numbers)
    return dropped


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn what an operator raises into a ConfigError that names the operator."""
    try:
        yield
    except Exception as error:
        problem = f"data-juicer cannot run it ({in_a_line(error, most=500)})"
        raise ConfigError(name, problem, "correct it in the recipe, or remove it") from None


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Keep data-juicer from printing, and from installing packages; yield the list of its warnings."""
    warnings = list[str]()
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from data_juicer.utils.lazy_loader import LazyLoader
        from loguru import logger

        LazyLoader._install_package = staticmethod(_refuse_to_install)
        logger.remove()  # what data-juicer added when it was imported
        logger.add(lambda line: warnings.append(" ".join(line.record["message"].split())), level="WARNING")
        yield warnings


def _refuse_to_install(package: str, pip_args: object = None) -> None:
    raise ImportError(f"it needs {package}, which is not installed here")
