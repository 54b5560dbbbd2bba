"""OpenAI chat logs: one conversation, or one request with its response, in each line.

- `{"messages": [...], "tools": [...], "reward": 1.0}`, as fine-tuning files have it: each assistant message
  is an action, and a reward is the outcome of all of them.
- `{"messages": [...], "tools": [...], "response": {"choices": [...]}}`: each choice is an action.
- `{"request": {"messages": ..., "tools": ...}, "response": {"choices": [...]}}`: each choice is an action.
  The assistant messages of the request are not, because they have records of their own.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Tally,
    Tools,
    actions,
    chat_messages,
    expected,
    function_tools,
    json_lines,
    reward,
    unknown_line,
)
from composer_plugins.recipes.trace_replay.states import CUT_OFF

READ = frozenset(("messages", "tools", "request", "response", "reward"))


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line of an OpenAI chat log."""
    return "messages" in row or {"request", "response"} <= row.keys()


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each action in a file; `tools` stands in where a record has none."""
    for where, row in json_lines(path, label, tally):
        if not recognises(row):
            fields = ", ".join(sorted(row)) or "none"
            raise unknown_line(where, f"a line of an OpenAI chat log has the fields {fields}")
        tally.lines.update(f"field {name!r} of an OpenAI record" for name in row.keys() - READ)
        response = row.get("response")
        if "messages" in row and isinstance(response, dict) and (response.keys() & {"choices", "error"}):
            yield from _of_exchange(where, {**row, "request": row}, tools, tally)
        elif "messages" in row:
            if "response" in row:
                tally.lines["field 'response' of an OpenAI record, which has no choices (not read)"] += 1
            own, outcome = function_tools(where, row.get("tools")) or tools, reward(where, row, tally)
            yield from of_messages(where, row["messages"], own, tally, outcome=outcome)
        else:
            yield from _of_exchange(where, row, tools, tally)


def of_messages(
    where: str,
    raw: Any,
    tools: Tools | None,
    tally: Tally,
    *,
    first: int = 0,
    outcome: float | None = None,
    is_truncated: bool = False,
) -> Iterator[Acted]:
    """The assistant messages of a conversation from `first` on; the last may be cut at the length limit."""
    messages = chat_messages(where, raw, tally)
    own = [i for i, one in enumerate(messages) if i >= first and one.message["role"] == "assistant"]
    for i in own:
        is_cut, key = is_truncated and i == own[-1], f"{where}/{i}"
        yield from actions(messages[:i], messages[i], tools, where, outcome, key, tally, is_cut=is_cut)


def _of_exchange(where: str, row: dict[str, Any], tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    request = expected(where, row["request"], dict, "request")
    response = row["response"]
    if response is None or (isinstance(response, dict) and response.get("error")):
        tally.lines["request that failed"] += 1
        return
    choices = expected(where, response, dict, "response").get("choices")
    raw = expected(where, request.get("messages"), list, "messages of the request")
    tools, outcome = function_tools(where, request.get("tools")) or tools, reward(where, row, tally)
    for number, choice in enumerate(expected(where, choices, list, "choices of the response")):
        message = expected(where, choice, dict, "a choice").get("message")
        is_truncated = choice.get("finish_reason") == CUT_OFF
        whole = [*raw, {"role": "assistant", **expected(where, message, dict, "message of a choice")}]
        more: dict[str, Any] = {"outcome": outcome, "is_truncated": is_truncated}
        for acted in of_messages(where, whole, tools, tally, first=len(raw), **more):
            yield acted._replace(key=f"{acted.key}/{number}")
