"""What the readers of all formats share: lines of JSON, chat messages, points at which a model acted."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.errors import DataError, in_a_line
from composer_plugins.recipes.shared import cut
from composer_plugins.recipes.trace_replay.states import Message

Tools = list[dict[str, Any]]


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


def unknown_line(where: str, problem: str) -> DataError:
    """The error for a line that a known format should not have."""
    return DataError(where, problem, "remove the line from a copy of the log, or report the new line type")


LFS = b"version https://git-lfs"
FAILED_TOOL = "[the tool reported an error]"
TEXTS = ("text", "input_text", "output_text", "summary_text")  # the last three are of the Responses API
KINDS: dict[Any, str] = {list: "a list", dict: "an object", str: "a text"}


def wrong_value(where: str, problem: str) -> DataError:
    """The error for a value that its format does not allow."""
    return DataError(where, problem, "correct the value in a copy of the log, or remove the line there")


def json_lines(path: Path, label: str, tally: Tally) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a file as (label:number, object); only a last line without a line break may be torn.

    A file that is one JSON value, an object or a list of objects, has one of them in each "line". A list of
    messages is one conversation.
    """
    text = path.read_bytes()
    if text.startswith(LFS):
        problem = "it is a pointer of Git LFS, and not the log itself"
        raise DataError(label, problem, "fetch the log: git lfs pull")
    lines = text.split(b"\n")
    if text.lstrip().startswith(b"[") or text.lstrip().split(b"\n", 1)[0].strip() == b"{":
        whole: Any = None
        with suppress(ValueError, RecursionError):
            whole = json.loads(text.decode())
        rows = whole if isinstance(whole, list) else [whole]
        if rows and all(isinstance(row, dict) for row in rows):
            if all("role" in row for row in rows):  # the messages of one conversation
                rows = [{"messages": rows}]
            is_clean = b"\\ud" not in text.lower()
            for number, row in enumerate(rows, start=1):
                yield f"{label}:{number}", row if is_clean else mapped(row, without_lone_surrogates)
            return
    for number, raw in enumerate(lines, start=1):
        if not raw.strip():
            continue
        where = f"{label}:{number}"
        try:
            row = json.loads(raw.decode())
        except (ValueError, RecursionError) as error:
            if 1 < number == len(lines):
                tally.lines["torn last line of a file that is being written"] += 1
                return
            problem = f"the line is not JSON: {in_a_line(error)}"
            raise DataError(where, problem, "give logs with one JSON object in each line") from None
        if not isinstance(row, dict):
            problem = f"the line is {cut(repr(row), 60)}"
            raise DataError(where, problem, "give logs with one JSON object in each line")
        yield where, (mapped(row, without_lone_surrogates) if b"\\ud" in raw.lower() else row)


def mapped(value: Any, function: Callable[[str], str]) -> Any:
    """A JSON value with `function` applied to each of its strings, except the names of fields."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [mapped(one, function) for one in value]
    if isinstance(value, dict):
        return {key: mapped(one, function) for key, one in value.items()}
    return value


def without_lone_surrogates(text: str) -> str:
    """The text with each half of a character, which UTF-8 cannot write, replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def expected(where: str, value: Any, kind: type, name: str) -> Any:
    """The value, if it has the type that the format says."""
    if not isinstance(value, kind):
        raise wrong_value(where, f"{name} is {cut(repr(value), 60)}, and should be {KINDS[kind]}")
    return value


def json_text(value: Any) -> str:
    """Arguments of a tool call as a model would write them."""
    return json.dumps(value, ensure_ascii=False)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str, calls: Sequence[dict[str, Any]]) -> Message:
    """An assistant message; `tool_calls` is there only if it has calls."""
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def chat_messages(where: str, raw: Any, tally: Tally) -> list[Converted]:
    """The messages of a conversation, with an id of its own for each call of a message.

    A result without the id of its call is of the first call that waits. An id that two calls of a message
    have stands for them in their order.
    """
    found, waiting = list[Converted](), list[tuple[str, str]]()  # the id in the log, and the one here
    for number, one in enumerate(expected(where, raw, list, "messages")):
        message = expected(where, one, dict, "a message")
        if message.get("role") == "tool" and message.get("tool_call_id") is None and waiting:
            message = {**message, "tool_call_id": waiting[0][0]}
            tally.lines["tool result without the id of its call (taken in the order of the calls)"] += 1
        if any(isinstance(call, dict) and call.get("id") is None for call in message.get("tool_calls") or ()):
            calls = [{"id": f"call_{number}_{i}", **_with_id(x)} for i, x in enumerate(message["tool_calls"])]
            message = {**message, "tool_calls": calls}
        converted = chat_message(where, message, tally)
        if message.get("role") == "tool":
            given = converted.message["tool_call_id"]
            if mine := next((one for one in waiting if one[0] == given), None):
                waiting.remove(mine)
                converted.message["tool_call_id"] = mine[1]
        else:
            waiting = []
            for call in converted.message.get("tool_calls", ()):
                before = sum(one == call["id"] for one, _ in waiting)
                waiting.append((call["id"], f"{call['id']}_{before + 1}" if before else call["id"]))
                call["id"] = waiting[-1][1]
        found.append(converted)
    return found


def _with_id(call: Any) -> dict[str, Any]:
    return {key: value for key, value in call.items() if key != "id" or value is not None}


def result(call_id: str, text: str, lost: str | None, is_error: Any = False) -> Converted:
    """The result of a tool call. Chat messages have no field for an error, so the text says it."""
    text = f"{FAILED_TOOL}\n{text}" if is_error is True else text
    return Converted({"role": "tool", "tool_call_id": call_id, "content": text}, lost)


def chat_message(where: str, raw: Any, tally: Tally) -> Converted:
    """An OpenAI or verifiers message in one form: text content, calls as function calls, no reasoning."""
    message = expected(where, raw, dict, "a message")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise unknown_line(where, f"a message has the role {role!r}")
    if message.get("function_call"):
        raise unknown_line(where, "a message has a function_call, the form before tool_calls")
    content, lost = text_content(where, message.get("content"))
    if role == "assistant":
        calls = [_call(where, one) for one in message.get("tool_calls") or ()]
        if message.get("weight") == 0:
            tally.lines["weight 0 of an assistant message (not used: it is an action like the others)"] += 1
        if any(message.get(one) for one in ("reasoning_content", "reasoning", "thinking_blocks")):
            tally.lines["reasoning of an assistant message (left out of the states)"] += 1
        if any(call is None for call in calls):
            lost = lost or "a tool call that is not a function call"
        return Converted(assistant(content, [call for call in calls if call]), lost)
    if role == "tool":
        call_id = expected(where, message.get("tool_call_id"), str, "tool_call_id of a tool message")
        return result(call_id, content, lost, message.get("is_error"))
    return Converted({"role": "system" if role == "developer" else role, "content": content}, lost)


def text_content(where: str, content: Any) -> tuple[str, str | None]:
    """The text of a message's content, and what of it is no text."""
    if content is None or isinstance(content, str):
        return content or "", None
    parts = expected(where, content, list, "content of a message")
    texts, lost = texts_of(where, "a message", parts, ("image_url", "input_audio", "file", "refusal"))
    return "".join(texts), lost


def texts_of(
    where: str, whose: str, blocks: list, lost_kinds: tuple[str, ...]
) -> tuple[list[str], str | None]:
    """The texts of a message's blocks, and what of them is no text."""
    texts, lost = [], None
    for block in blocks:
        kind = expected(where, block, dict, f"a block of {whose}").get("type")
        if kind in TEXTS:
            texts.append(expected(where, block.get("text"), str, f"text of {whose}"))
        elif kind == "tool_reference":  # Claude Code's answer of a search for tools
            texts.append(json_text(block))
        elif kind in lost_kinds:
            lost = f"content of the type {kind}"
        else:
            raise unknown_line(where, f"{whose} has a block of the type {kind!r}")
    return texts, lost


def _call(where: str, raw: Any) -> dict[str, Any] | None:
    """A tool call, flat or with `function`, or as JSON text; None if it calls no function."""
    if isinstance(raw, str):  # verifiers before 0.2 wrote each call as text
        try:
            raw = json.loads(raw)
        except ValueError:
            raise wrong_value(where, f"a tool call is {cut(repr(raw), 60)}, which is not JSON") from None
    call = expected(where, raw, dict, "a tool call")
    if call.get("type", "function") != "function":
        return None
    function = call.get("function", call)
    arguments = expected(where, function, dict, "function of a tool call").get("arguments")
    name = expected(where, function.get("name"), str, "name of a tool call")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return tool_call(expected(where, call.get("id"), str, "id of a tool call"), name, arguments)


def function_tools(where: str, raw: Any) -> Tools | None:
    """Tools as OpenAI function tools; verifiers has the inner table alone, and some logs have JSON text."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise wrong_value(where, f"tools is the text {cut(repr(raw), 60)}, which is not JSON") from None
    if not raw:
        return None
    tools = []
    for one in expected(where, raw, list, "tools"):
        function = one.get("function", one) if isinstance(one, dict) else one
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            problem = f"a tool is {cut(repr(one), 60)}, and should be a function tool with a name"
            raise wrong_value(where, problem)
        known = {
            key: function[key]
            for key in ("name", "description", "parameters", "strict")
            if function.get(key) is not None
        }
        tools.append({"type": "function", "function": known})
    return tools


def finite(where: str, reward: Any) -> float | None:
    """A reward as a number; None if the log has none."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise wrong_value(where, f"the reward is {cut(repr(reward), 60)}, and should be a finite number")
    return float(reward)


def reward(where: str, row: dict[str, Any], tally: Tally) -> float | None:
    """The number in the field `reward` of a record, the outcome of all its actions."""
    value = row.get("reward")
    if value is not None and not isinstance(value, int | float):
        tally.lines["field 'reward' that is not a number (not read)"] += 1
        return None
    return finite(where, float(value) if isinstance(value, bool) else value)


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
    if not before:
        return "nothing comes before it"
    if before[0].message["role"] in ("assistant", "tool") and not any(
        one.message["role"] in ("user", "system") for one in before
    ):
        return "its task is not in the log, which begins with the model's own message"
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
