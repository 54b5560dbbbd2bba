"""OpenAI chat logs: one conversation, or one request with its response, in each line.

- `{"messages": [...], "tools": [...], "reward": 1.0}`, as fine-tuning files have it: each assistant message
  is an action, and a reward is the outcome of all of them.
- The same with `"response": {"choices": [...]}`, or `{"request": {"messages": ..., "tools": ...},
  "response": ...}`: each choice is an action. The assistant messages of the request are not, because they
  have lines of their own.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Converted,
    Tally,
    Tools,
    actions,
    assistant,
    expected,
    function_tools,
    json_lines,
    json_text,
    texts_of,
    tool_call,
    wrong_line,
)
from composer_plugins.recipes.trace_replay.states import CUT_OFF

READ = frozenset(("messages", "tools", "request", "response", "reward"))
REASONING = ("reasoning_content", "reasoning")


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line of an OpenAI chat log."""
    return "messages" in row or {"request", "response"} <= row.keys()


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each action in a file; `tools` stands in where a line has none."""
    for number, (where, row) in enumerate(json_lines(path, label, tally)):
        if not recognises(row):
            fields = ", ".join(sorted(row)) or "none"
            raise wrong_line(where, f"a line of an OpenAI chat log has the fields {fields}")
        tally.lines.update(f"field {name!r} of an OpenAI line" for name in row.keys() - READ)
        request = expected(where, row.get("request", row), dict, "request")
        own, outcome = function_tools(where, request.get("tools")) or tools, _reward(where, row)
        raw = expected(where, request.get("messages"), list, "messages")
        messages = [_message(where, one, tally) for one in raw]
        if "response" in row:
            steps = [(messages, *choice) for choice in _choices(where, row["response"], tally)]
        else:
            said = [i for i, one in enumerate(messages) if one.message["role"] == "assistant"]
            steps = [(messages[:i], messages[i], False) for i in said]
        for step, (before, observed, is_cut) in enumerate(steps):
            key = f"{path}:{number}/{step}"
            yield from actions(before, observed, own, where, outcome, key, tally, is_cut=is_cut)


def _choices(where: str, response: Any, tally: Tally) -> Iterator[tuple[Converted, bool]]:
    """The choices of a response, and whether each was cut at the length limit."""
    if response is None or (isinstance(response, dict) and response.get("error")):
        tally.lines["request that failed"] += 1
        return
    choices = expected(where, response, dict, "response").get("choices")
    for choice in expected(where, choices, list, "choices of the response"):
        message = expected(where, choice, dict, "a choice").get("message")
        message = {"role": "assistant", **expected(where, message, dict, "message of a choice")}
        yield _message(where, message, tally), choice.get("finish_reason") == CUT_OFF


def _message(where: str, raw: Any, tally: Tally) -> Converted:
    """A message in one form: text content, calls of functions, no reasoning."""
    message = expected(where, raw, dict, "a message")
    role, content, lost = message.get("role"), message.get("content") or "", None
    if not isinstance(content, str):
        texts, lost = texts_of(where, expected(where, content, list, "content of a message"))
        content = "".join(texts)
    if role == "assistant":
        if any(message.get(one) for one in REASONING):
            tally.lines["reasoning of an assistant message (left out of the states)"] += 1
        calls = [_call(where, one) for one in message.get("tool_calls") or ()]
        if None in calls:
            lost = "a tool call that is not a function call"
        return Converted(assistant(content, [call for call in calls if call]), lost)
    if role == "tool":
        call_id = expected(where, message.get("tool_call_id"), str, "tool_call_id of a tool message")
        return Converted({"role": "tool", "tool_call_id": call_id, "content": content}, lost)
    if role not in ("system", "developer", "user"):
        raise wrong_line(where, f"a message has the role {role!r}")
    return Converted({"role": "system" if role == "developer" else role, "content": content}, lost)


def _call(where: str, raw: Any) -> dict[str, Any] | None:
    """A tool call; None if it calls no function."""
    call = expected(where, raw, dict, "a tool call")
    if call.get("type", "function") != "function":
        return None
    function = expected(where, call.get("function"), dict, "function of a tool call")
    name = expected(where, function.get("name"), str, "name of a tool call")
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return tool_call(expected(where, call.get("id"), str, "id of a tool call"), name, arguments)


def _reward(where: str, row: dict[str, Any]) -> float | None:
    """The number in the field `reward` of a line, the outcome of all its actions."""
    reward = row.get("reward")
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise wrong_line(where, f"the reward is {reward!r}, and should be a finite number")
    return float(reward)
