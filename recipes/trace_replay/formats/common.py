"""What both readers share: lines of JSON, blocks of text, tools, and the points at which a model acted."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import DataError, in_a_line
from composer_plugins.recipes.trace_replay.states import Message

Tools = list[dict[str, Any]]
FAILED_TOOL = "[the tool reported an error]"


class Acted(NamedTuple):
    """A point of a log at which the model acted, before redaction."""

    messages: list[Message]
    tools: Tools | None
    observed: Message
    source: str  # "file:line"
    outcome: float | None
    key: str  # equal for copies of one action in several files


@dataclass
class Tally:
    """What a reader knowingly leaves out: lines that hold no message, and actions, with numbers; files."""

    lines: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # by file, why


class Converted(NamedTuple):
    """A message as OpenAI chat messages have it, and what of it cannot be written as text, if anything."""

    message: Message
    lost: str | None


def wrong_line(where: str, problem: str) -> DataError:
    """The error for a line that its format does not allow."""
    return DataError(where, problem, "correct or remove the line in a copy of the log")


@contextmanager
def naming_the_line(where: str) -> Iterator[None]:
    """Raise DataError with the place of a line, where a value is absent or of another type."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise wrong_line(where, f"it is not as its format says ({in_a_line(error)})") from error


def json_lines(path: Path, label: str, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a file as (label:number, object); only a last line without a line break may be torn."""
    lines = path.read_bytes().split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        where = f"{label}:{number}"
        try:
            row = parsed(raw.decode())
        except (ValueError, RecursionError) as error:
            if 1 < number == len(lines):
                tally.lines["torn last line of a file that is being written"] += 1
                return
            raise wrong_line(where, f"the line is not JSON: {in_a_line(error)}") from None
        if not isinstance(row, dict):
            raise wrong_line(where, "the line is not a JSON object")
        yield where, row


def parsed(text: str) -> Any:
    """The JSON value of a text, without lone surrogates."""
    value = json.loads(text)
    return json.loads(without_lone_surrogates(json_text(value))) if "\\ud" in text.lower() else value


def without_lone_surrogates(text: str) -> str:
    """The text with each half of a character, which UTF-8 cannot write, replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def json_text(value: Any) -> str:
    """Arguments of a tool call as a model would write them."""
    return json.dumps(value, ensure_ascii=False)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, calls: Sequence[dict[str, Any]]) -> Message:
    """An assistant message; `tool_calls` is there only if it has calls."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def texts_of(blocks: Sequence[Any]) -> tuple[list[str], str | None]:
    """The texts of a message's blocks, and what of them is no text."""
    texts, lost = [], None
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block["text"])
        elif kind == "tool_reference":  # Claude Code's answer of a search for tools
            texts.append(json_text(block))
        else:
            lost = f"content of the type {kind}"
    return texts, lost


def function_tools(raw: Any) -> Tools | None:
    """Tools as OpenAI function tools; None if there are none."""
    tools = []
    for one in raw or ():
        function = one["function"]
        names = ("description", "parameters", "strict")
        known = {name: function[name] for name in names if function.get(name) is not None}
        tools.append({"type": "function", "function": {"name": function["name"], **known}})
    return tools or None


def actions(
    before: Sequence[Converted],
    observed: Converted,
    tools: Tools | None,
    where: str,
    outcome: float | None,
    key: str,
    tally: Tally,
    *,
    is_cut: bool,
) -> Iterator[Acted]:
    """The action after these messages; none, and a count of the reason, if it cannot be used."""
    if reason := "it was cut at the length limit" if is_cut else why_left_out(before, observed):
        tally.actions[reason] += 1
    else:
        yield Acted([one.message for one in before], tools, observed.message, where, outcome, key)


def why_left_out(before: Sequence[Converted], observed: Converted) -> str | None:
    """Why an action cannot be replayed or trained on; None if it can."""
    if not any(one.message["role"] in ("user", "system") for one in before):
        return "its task is not in the log"
    for one in (*before, observed):
        if one.lost:
            return f"it needs {one.lost}"
    if not observed.message["content"].strip() and not observed.message.get("tool_calls"):
        return "the action is empty"
    if before[-1].message["role"] == "assistant" and not before[-1].message.get("tool_calls"):
        return "what it answers is not in the log: the message before it is the model's own"
    if not _calls_are_answered([one.message for one in before]):
        return "a tool call before it has no result, or a result has no call"
    return None


def _calls_are_answered(messages: Sequence[Message]) -> bool:
    """Whether each call is followed by its result, as every chat endpoint requires."""
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return False
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return False
        else:
            waiting = [call["id"] for call in message.get("tool_calls", ())]
    return not waiting
