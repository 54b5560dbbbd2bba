"""OpenAI's Responses API: one request with its response in each line.

- `{"input": ..., "output": [...], "instructions": ..., "tools": [...]}`;
- `{"request": {"input": ...}, "response": {"output": [...]}}`.

A list of items becomes chat messages: what the model wrote without a result between (texts, calls of tools)
is one assistant message, and the whole output of a response is one action. Reasoning is left out.
"""

from collections.abc import Iterator, Sequence
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
    result,
    reward,
    texts_of,
    tool_call,
    unknown_line,
)

RESULTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
# Items that Codex keeps and no request holds.
NO_ITEMS = ("ghost_snapshot", "other")
LOST = ("input_image", "input_file", "input_audio", "refusal", "image_url")
REASONING = "reasoning of an assistant message (left out of the states)"


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line with a request to the Responses API and its response."""
    request, response = row.get("request", row), row.get("response", row)
    are_objects = isinstance(request, dict) and isinstance(response, dict)
    return are_objects and "input" in request and "output" in response


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """The action of each response in a file; `tools` stands in where a request has none."""
    for where, row in json_lines(path, label, tally):
        if not recognises(row):
            fields = ", ".join(sorted(row)) or "none"
            raise unknown_line(where, f"a line of a log of the Responses API has the fields {fields}")
        request: Any = row.get("request", row)
        response: Any = row.get("response", row)
        if response.get("error") or response["output"] is None:
            tally.lines["request that failed"] += 1
            continue
        if request.get("previous_response_id") or request.get("conversation"):
            tally.actions["its history is not in the file"] += 1
            continue
        given = request["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        first = request.get("instructions")
        system = [{"role": "system", "content": first}] if first else []
        before = messages_of(where, [*system, *expected(where, items, list, "input")], tally)
        after = messages_of(where, expected(where, response["output"], list, "output"), tally)
        own, outcome = functions(where, request.get("tools"), tally) or tools, reward(where, row, tally)
        is_cut = response.get("status") == "incomplete"
        for number, (_, observed) in enumerate(after):
            if observed.message["role"] == "assistant":
                history = [one for _, one in (*before, *after[:number])]
                key = f"{where}/{number}"
                yield from actions(history, observed, own, where, outcome, key, tally, is_cut=is_cut)


def functions(where: str, raw: Any, tally: Tally) -> Tools | None:
    """The function tools of a request; those that the provider runs are counted."""
    every = expected(where, raw or [], list, "tools")
    own = [one for one in every if not isinstance(one, dict) or one.get("type", "function") == "function"]
    tally.lines.update("tool that is not a function (left out)" for _ in range(len(every) - len(own)))
    return function_tools(where, own)


def messages_of(where: str, items: Sequence[Any], tally: Tally) -> list[tuple[int, Converted]]:
    """Items as chat messages, each with the number of its first item."""
    found, turn = list[tuple[int, Converted]](), list[int]()
    for number, raw in enumerate(items):
        kind = expected(where, raw, dict, "an item").get("type", "message")
        if kind in NO_ITEMS:
            tally.lines[f"{kind} item"] += 1
        elif kind in RESULTS or (kind == "message" and raw.get("role") != "assistant"):
            found += _turn(where, items, turn, tally)
            turn = []
            found.append((number, _given(where, raw, kind)))
        else:
            turn.append(number)
    return [*found, *_turn(where, items, turn, tally)]


def _given(where: str, item: dict[str, Any], kind: str) -> Converted:
    """A message to the model, or the result of a call."""
    if kind in RESULTS:
        call_id = expected(where, item.get("call_id", item.get("id")), str, "call_id of a result")
        output: Any = item.get("output")
        failed = False
        if isinstance(output, dict):  # of Codex before 0.40
            output, failed = output.get("content"), output.get("success") is False
        text, lost = _text(where, output)
        return result(call_id, text, lost, failed)
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise unknown_line(where, f"a message has the role {role!r}")
    text, lost = _text(where, item.get("content"))
    return Converted({"role": "system" if role == "developer" else role, "content": text}, lost)


def _turn(where: str, items: Sequence[Any], turn: list[int], tally: Tally) -> Iterator[tuple[int, Converted]]:
    """What the model wrote in these items, as one assistant message."""
    texts, calls, lost = list[str](), list[dict[str, Any]](), None
    for item in (items[number] for number in turn):
        kind = item.get("type", "message")
        if kind == "message":
            text, gone = _text(where, item.get("content"))
            texts, lost = [*texts, text], lost or gone
        elif kind in ("function_call", "custom_tool_call"):
            call_id = expected(where, item.get("call_id"), str, "call_id of a call")
            name = expected(where, item.get("name"), str, "name of a call")
            text = item.get("arguments")
            text = json_text({"input": item.get("input")}) if kind == "custom_tool_call" else text
            calls.append(tool_call(call_id, name, expected(where, text, str, "arguments of a call")))
        elif kind == "local_shell_call":
            call_id = expected(where, item.get("call_id") or item.get("id"), str, "call_id of a call")
            calls.append(tool_call(call_id, "local_shell", json_text(item.get("action") or {})))
        elif kind == "reasoning":
            tally.lines[REASONING] += 1
        elif kind == "item_reference":
            lost = "an item that the log only refers to"
        elif str(kind).startswith("compaction") or kind == "context_compaction":
            lost = "a history that the provider has compacted"
        elif str(kind).endswith(("_call", "_call_output")) or str(kind).startswith("mcp_"):
            lost = "a tool that the provider's server ran"
        else:
            raise unknown_line(where, f"an item has the type {kind!r}")
    if texts or calls or lost:
        yield turn[0], Converted(assistant("\n\n".join(filter(None, texts)), calls), lost)


def _text(where: str, content: Any) -> tuple[str, str | None]:
    if content is None or isinstance(content, str):
        return content or "", None
    texts, lost = texts_of(where, "an item", expected(where, content, list, "content of an item"), LOST)
    return "".join(texts), lost
