"""What a run logged, from the files of several frameworks, and what is wrong with it by log_rules.toml."""

import json
import re
import sqlite3
import struct
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from importlib import import_module
from math import inf, isfinite, nan
from pathlib import Path
from statistics import median
from typing import Any

from composer_plugins.errors import ConfigError, Finding, in_a_line

Values = dict[int, float]  # of a metric, by the step
Log = dict[str, Values]  # by metric

STEPS = ("train/global_step", "training/global_step", "step", "_step")  # _step: wandb's count of calls
ACCEPTED = "TRL's trainer_state.json or the folder of its run, jsonl, .wandb, trackio's .db, or verl's or "
ACCEPTED += "PRIME-RL's console output"
VERL, PRIME_RL = re.compile(r"\bstep:(\d+) - (.*)"), re.compile(r"\bStep (\d+) \|(.*)")
CLUTTER = re.compile(r"\x1b\[[\d;]*m|np\.\w+\(|\)")  # colours, and np.float64(0.5)
NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|nan|inf(inity)?)", re.IGNORECASE)
BLOCK = 32768  # bytes: a .wandb file is a log of LevelDB


def examine(log: Log) -> tuple[list[tuple[int, Finding]], list[str]]:
    """Return what is wrong, with the step at which it began, and the kinds that the log has no metrics for.

    Of a kind, the metric that shows it first is named. Every reward function is named by itself.
    """
    found, seen = dict[str, tuple[int, Finding]](), dict[str, bool]()
    for rule in tomllib.loads(Path(__file__).with_name("log_rules.toml").read_text())["rule"]:
        kind, times, also = rule["kind"], rule["times"], rule.get("also", {})
        metrics = _metrics(log, rule["names"])
        others = _metrics(log, also["names"]) if "names" in also else metrics
        seen[kind] = seen.get(kind, False) or bool(metrics and others)
        for metric in metrics:
            values, held = log[metric], _steps(rule, log[metric])
            if also:
                beside = [metric] if metric in others else others
                held &= set().union(*(_steps(also, log[name]) for name in beside))
            order = [*values]
            rows = [order[i : i + times] for i in range(len(order) - times + 1)]
            if (first := next((row[0] for row in rows if held.issuperset(row)), None)) is not None:
                after = order[order.index(first) :]
                problem = f"{rule['problem']}: since step {first}, at {len(held & {*after})} of {len(after)} "
                problem += f"logged steps, last value {values[order[-1]]:.4g} (limit: {rule['source']})"
                key = f"{kind}: {metric if kind == 'constant reward' else ''}"
                one = first, Finding(rule["severity"], f"{kind}: {metric}", problem, rule["remedy"])
                found[key] = min(found.get(key, one), one, key=lambda each: each[0])
    return sorted(found.values(), key=lambda each: each[0]), [kind for kind in seen if not seen[kind]]


def _metrics(log: Log, names: Sequence[str]) -> list[str]:
    """Return the metrics of a log that have one of the names."""
    bare = {name: name.removeprefix("train/").removesuffix("/mean") for name in log}
    return [name for name in log if any(fnmatchcase(bare[name], one) for one in names)]


def _steps(rule: Mapping[str, Any], values: Values) -> set[int]:
    """Return the steps at which a metric passes a limit of log_rules.toml, which explains the fields."""
    found, earlier, of = set[int](), list[float](), rule.get("of", "value")
    for step, value in values.items():
        others, needed = (earlier[:5], 5) if of == "ratio to the start" else (earlier[-20:], 10)
        middle = median(others) if len(others) >= needed else 0.0
        compared = {
            "value": value,
            "size": abs(value),
            "is finite": isfinite(value),
            "value since the start": nan if any(one != value for one in earlier) else value,
        }.get(of, value / middle if middle > 0 else nan)
        over, under = compared > rule.get("above", inf), compared < rule.get("below", -inf)
        found |= {step} if over or under or compared == rule.get("equals", nan) else set()
        earlier += [value] if isfinite(value) else []
    return found


def read(paths: Iterable[Path]) -> Log:
    """Return what these files, or folders of TRL's checkpoints, log; ConfigError where one has no metric."""
    log = Log()
    for path in paths:
        problem = "no step with a metric is found"
        try:
            for row in _rows(path):
                found = {name: float(one) for name, one in row.items() if NUMBER.fullmatch(str(one))}
                step = next((found[key] for key in STEPS if key in found), nan)
                spans = {name: f"{name[:-4]}/min" for name in found if name.endswith("/max")}
                found |= {f"{a} - min": found[a] - found[b] for a, b in spans.items() if b in found}
                for name in (one for one in found if one not in STEPS and isfinite(step)):
                    log.setdefault(name, {})[int(step)] = found[name]
                    problem = ""
        except Exception as error:  # files, formats, a database: each has exceptions of its own
            problem = f"it cannot be read ({in_a_line(error, most=120)})"
        if problem:
            raise ConfigError(str(path), problem, f"give {ACCEPTED}")
    return {name: dict(sorted(values.items())) for name, values in log.items()}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file: flat metrics with a step."""
    if path.is_dir():  # each checkpoint has the log up to its step
        found = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
        states = [json.loads(one.read_text()) for one in found]
        yield from max(states, key=lambda one: one["global_step"], default={"log_history": []})["log_history"]
    elif path.suffix == ".json":
        yield from json.loads(path.read_text())["log_history"]
    elif (data := path.read_bytes()).startswith(b":W&B"):
        yield from _wandb_rows(data)
    elif data.startswith(b"SQLite format 3"):
        last = "SELECT run_name FROM metrics ORDER BY id DESC LIMIT 1"
        query = f"SELECT step, metrics FROM metrics WHERE run_name = ({last}) ORDER BY id"
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            for step, metrics in database.execute(query):
                yield {"step": step, **json.loads(metrics)}
    else:
        yield from map(_row, data.decode(errors="replace").splitlines())


def _row(line: str) -> dict[str, Any]:
    """The row that a line of jsonl or of a console has; {} if it has none."""
    if line.startswith("{"):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            return {}
        data = row.pop("data", {})  # verl's, in which orjson writes NaN as null
        return row | {name: nan if value is None else value for name, value in data.items()}
    line = CLUTTER.sub("", line)
    if found := VERL.search(line):
        cells = [cell.rpartition(":") for cell in found[2].split(" - ")]
    elif found := PRIME_RL.search(line):
        cells = [cell.strip().rpartition(" ") for cell in found[2].replace("%", "e-2").split("|")]
    return {"step": found[1], **{name: value for name, _, value in cells}} if found else {}


def _wandb_rows(data: bytes) -> Iterator[dict[str, Any]]:
    record, place, whole = import_module("wandb.proto.wandb_internal_pb2").Record, 7, b""  # after the header
    while place + 7 <= len(data):
        if (left := BLOCK - place % BLOCK) < 7:
            place += left  # padding
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole, place = whole + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            history, whole = record.FromString(whole).history, b""
            row = {"/".join(one.nested_key) or one.key: one.value_json.strip('"') for one in history.item}
            yield {"step": history.step.num, **row}
