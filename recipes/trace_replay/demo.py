"""The demo: a recorded session of Claude Code, three scripted teachers over HTTP, and a short training."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.shared import check_installed
from composer_plugins.recipes.trace_replay.commands import Redact, ask, console, make_pairs, make_states
from composer_plugins.recipes.trace_replay.formats.common import assistant, json_text, tool_call
from composer_plugins.recipes.trace_replay.report import PAIRS
from composer_plugins.recipes.trace_replay.scripted import ScriptedTeachers
from composer_plugins.recipes.trace_replay.states import Message
from composer_plugins.recipes.trace_replay.teachers import Teacher

RECORDED = Path(__file__).parent / "recorded"
SESSION, TOOLS = RECORDED / "session.jsonl", RECORDED / "tools.json"
TEACHERS = ("ada", "bob", "eve")
IGNORED = ["Bash.description"]


def run_demo(out: Path, steps: int) -> None:
    """Run every step on the recorded session; exit with 1 unless the margins rise."""
    check_installed("demo", ("trl", "transformers", "datasets"), "trl,trace-replay")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("--out", f"{out} is not an empty folder", "name a new folder")
    console.rule("1. states")
    make_states([SESSION], Redact.SECRETS, out, TOOLS)
    console.rule("2. replay")
    console.print(f"{', '.join(TEACHERS)}: scripted, on 127.0.0.1, with invented prices")
    with ScriptedTeachers(scripted_answer) as server:
        ask(out, teachers(server.base_url), 1.0, samples=1, concurrency=8)
    console.rule("3. pairs")
    make_pairs(out, ignore=IGNORED)
    console.print(pairs_table(out / PAIRS))
    console.rule("4. training")
    # Read when the Hugging Face libraries are imported. The model is made here, so no hub is needed.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    from composer_plugins.recipes.trace_replay.training import MARGINS, train

    margins = train(out / PAIRS, steps)
    shown = " ".join(f"{margin:.2f}" for margin in margins)
    console.print(f"{MARGINS} of {len(margins)} steps: {shown}", soft_wrap=True)
    if not margins or not margins[-1] > margins[0]:
        console.print("the margins have not risen")
        raise typer.Exit(1)
    console.print(f"the margins have risen from {margins[0]:.2f} to {margins[-1]:.2f}")


def scripted_answer(body: dict[str, Any]) -> Message:
    """What the recorded teacher `model` does after the last message of a request."""
    last = body["messages"][-1]["content"]
    rules = json.loads((RECORDED / "answers.json").read_text(encoding="utf-8"))
    answer = next(rule for rule in rules if last.endswith(rule["after"]))[body["model"]]
    if isinstance(answer, str):
        return {"content": answer}
    given = [(name, json_text(arguments)) for call in answer for name, arguments in call.items()]
    return assistant("", [tool_call(f"call_{i}", *call) for i, call in enumerate(given)])


def teachers(base_url: str) -> list[Teacher]:
    """The scripted teachers, with prices as if they cost something."""
    prices = {"usd_per_million_input": 1.0, "usd_per_million_output": 5.0}
    entry = {"base_url": base_url, "max_tokens": 256, **prices}
    return [Teacher.model_validate({"name": name, "model": name, **entry}) for name in TEACHERS]


def pairs_table(path: Path) -> Table:
    """The pairs of a parquet file, an action in a line."""
    table = Table("the trace did", "most teachers did", "teachers", box=SIMPLE_HEAD)
    for row in pq.read_table(path).to_pylist():
        agreeing = f"{row['n_teachers_agreeing']} of {row['n_teachers']}"
        table.add_row(_action(row["rejected"][0]), _action(row["chosen"][0]), agreeing)
    return table


def _action(message: Message) -> str:
    calls = [call["function"] for call in message["tool_calls"] or ()]
    shown = [f"{one['name']} {', '.join(map(str, json.loads(one['arguments']).values()))}" for one in calls]
    return "; ".join(shown) or message["content"]
