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
    function_tools,
    json_lines,
    json_text,
    naming_the_line,
    texts_of,
    tool_call,
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
        tally.lines.update(f"field {name!r} of an OpenAI line" for name in row.keys() - READ)
        with naming_the_line(where):
            request, outcome = row.get("request", row), _reward(row)
            own = function_tools(request.get("tools")) or tools
            messages = [_message(one, tally) for one in request["messages"]]
            if "response" in row:
                steps = [(messages, *choice) for choice in _choices(row["response"], tally)]
            else:
                said = [i for i, one in enumerate(messages) if one.message["role"] == "assistant"]
                steps = [(messages[:i], messages[i], False) for i in said]
        for step, (before, observed, is_cut) in enumerate(steps):
            key = f"{path}:{number}/{step}"
            yield from actions(before, observed, own, where, outcome, key, tally, is_cut=is_cut)


def _choices(response: Any, tally: Tally) -> Iterator[tuple[Converted, bool]]:
    """The choices of a response, and whether each was cut at the length limit."""
    if response is None or response.get("error"):
        tally.lines["request that failed"] += 1
        return
    for choice in response["choices"]:
        message = {"role": "assistant", **choice["message"]}
        yield _message(message, tally), choice.get("finish_reason") == CUT_OFF


def _message(message: Any, tally: Tally) -> Converted:
    """A message in one form: text content, calls of functions, no reasoning."""
    role, content, lost = message.get("role"), message.get("content") or "", None
    if not isinstance(content, str):
        texts, lost = texts_of(content)
        content = "".join(texts)
    if role == "assistant":
        if any(message.get(one) for one in REASONING):
            tally.lines["reasoning of an assistant message (left out of the states)"] += 1
        calls = [_call(one) for one in message.get("tool_calls") or ()]
        if None in calls:
            lost = "a tool call that is not a function call"
        return Converted(assistant(content, [call for call in calls if call]), lost)
    if role == "tool":
        call_id = message["tool_call_id"]
        return Converted({"role": "tool", "tool_call_id": call_id, "content": content}, lost)
    if role not in ("system", "developer", "user"):
        raise ValueError(f"a message has the role {role!r}")
    return Converted({"role": "system" if role == "developer" else role, "content": content}, lost)


def _call(call: Any) -> dict[str, Any] | None:
    """A tool call; None if it calls no function."""
    if call.get("type", "function") != "function":
        return None
    arguments = call["function"].get("arguments")
    arguments = arguments if isinstance(arguments, str) else json_text(arguments or {})
    return tool_call(call["id"], call["function"]["name"], arguments)


def _reward(row: dict[str, Any]) -> float | None:
    """The number in the field `reward` of a line, the outcome of all its actions."""
    reward = row.get("reward")
    if reward is None:
        return None
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward!r}")
    return float(reward)
