"""Codex's session files, `~/.codex/sessions/**/rollout-*.jsonl`, of 0.20 to 2026.

A line has a type and a payload: `session_meta`, `response_item`, `compacted`, `turn_context`, `event_msg`.
Before September 2025 the items stood in the lines themselves, below a first line with the session's id. The
items are those of the Responses API. After a compaction the history is what the line `compacted` says; where
it does not say it, or where turns were rolled back, the actions that follow are left out.

The base instructions are there since 2026, and the tools are not in these files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Tally,
    Tools,
    actions,
    expected,
    json_lines,
)
from composer_plugins.recipes.trace_replay.formats.responses import messages_of

WRAPPED = ("session_meta", "response_item", "compacted", "turn_context", "event_msg")
LOST = "its history is not in the file, after a compaction or a rollback"


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line of a rollout."""
    is_first = {"id", "timestamp", "instructions"} <= row.keys() and "type" not in row
    return is_first or (row.get("type") in WRAPPED and "payload" in row)


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each response of the model in a rollout, with the messages before it."""
    items, places, given, is_lost = list[Any](), list[str](), 0, False
    for where, row in json_lines(path, label, tally):
        kind, payload = row.get("type"), row.get("payload")
        if kind not in WRAPPED:  # an older rollout
            if kind is None:
                tally.lines["line about the session"] += 1
            else:
                items.append(row)
                places.append(where)
            continue
        payload = expected(where, payload, dict, "payload")
        inner = payload.get("type")
        if kind == "response_item":
            items.append(payload)
            places.append(where)
        elif kind == "session_meta" and isinstance(payload.get("base_instructions"), dict) and not items:
            items, places = [{"role": "system", "content": payload["base_instructions"].get("text")}], [where]
            given = 1
        elif kind == "compacted" or inner == "thread_rolled_back":
            yield from _acted(items, places, given, tools, is_lost, tally)
            kept = payload.get("replacement_history") if kind == "compacted" else None
            is_lost = not isinstance(kept, list)
            items = list(kept) if isinstance(kept, list) else []
            places, given = [where] * len(items), len(items)
        else:
            tally.lines[f"{kind} {inner}" if isinstance(inner, str) else str(kind)] += 1
    yield from _acted(items, places, given, tools, is_lost, tally)


def _acted(
    items: list[Any], places: list[str], given: int, tools: Tools | None, is_lost: bool, tally: Tally
) -> Iterator[Acted]:
    """The actions of a part of a rollout; the first `given` items are its history."""
    messages = messages_of(places[0], items, tally) if items else []
    for number, (first, observed) in enumerate(messages):
        if observed.message["role"] != "assistant" or first < given:
            continue
        if is_lost:
            tally.actions[LOST] += 1
            continue
        before, where = [one for _, one in messages[:number]], places[first]
        yield from actions(before, observed, tools, where, None, where, tally, is_cut=False)
