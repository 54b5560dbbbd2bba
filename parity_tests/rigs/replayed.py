"""Logs, states, teachers and runs for the tests of recipes/trace_replay."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay import request
from composer_plugins.recipes.trace_replay.formats import log_files, read_logs
from composer_plugins.recipes.trace_replay.formats.common import Acted, Tally
from composer_plugins.recipes.trace_replay.journal import Journal
from composer_plugins.recipes.trace_replay.replay import Summary, replay
from composer_plugins.recipes.trace_replay.states import State, state_id
from composer_plugins.recipes.trace_replay.teachers import Teacher

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


def a_call(command: str) -> dict[str, Any]:
    """An assistant message that calls the tool."""
    function = {"name": "run", "arguments": json.dumps({"command": command})}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def a_state(number: int) -> State:
    """A state, which differs from those of other numbers."""
    messages = [{"role": "user", "content": f"task {number}"}]
    observed = {"role": "assistant", "content": ""} | {"tool_calls": a_call("ls")["tool_calls"]}
    return State(state_id(messages, TOOLS), messages, TOOLS, observed, f"log.jsonl:{number}", None)


def a_teacher(base_url: str, name: str = "a", **changes: Any) -> Teacher:
    """A teacher whose model has its name. A token of its prompt costs 1e-6 USD, and one of an answer 4e-6."""
    entry = {"name": name, "model": name, "base_url": base_url, "max_tokens": 50, "timeout": 10.0}
    entry |= {"usd_per_million_input": 1.0, "usd_per_million_output": 4.0}
    return Teacher.model_validate(entry | changes)


FREE = {"usd_per_million_input": 0, "usd_per_million_output": 0}


def most_usd(teacher: Teacher) -> float:
    """The most that the answer of a teacher to one of these states can cost."""
    return request.most_usd(teacher, request.chat_body(a_state(0), teacher))


def usd_of(usage: dict[str, int]) -> float:
    """What a teacher bills for these tokens."""
    return usage["prompt_tokens"] * 1e-6 + usage["completion_tokens"] * 4e-6


def echo(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a scripted teacher: a call that names the model and the task."""
    return a_call(f"{body['model']}: {body['messages'][0]['content']}")


def replayed(
    path: Path,
    states: Sequence[State],
    teachers: Sequence[Teacher],
    *,
    samples: int = 1,
    concurrency: int = 4,
    max_usd: float = 100.0,
    seen: list[Summary] | None = None,
) -> Summary:
    """Run a replay with the journal at `path`."""
    options = {"samples": samples, "concurrency": concurrency, "max_usd": max_usd}
    with Journal(path) as journal:
        on_progress = (seen if seen is not None else []).append
        return asyncio.run(replay(states, teachers, journal, **options, on_progress=on_progress))


def read_log(path: Path, rows: Sequence[Any] | str) -> tuple[list[Acted], Tally]:
    """Write a log of these rows, or of this text, and read it."""
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    tally = Tally()
    return list(read_logs(log_files([path]), None, tally)), tally
