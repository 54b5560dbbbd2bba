"""Claude Code's session files: a tree of lines, of which one model response may take several.

The format is not documented. What is read here was observed in versions 1.0 to 2.1:

- `parentUuid` makes a tree: a user who goes back starts a branch, a sub-agent (`isSidechain`) has a root of
  its own, in this file or in `agent-*.jsonl`. Lines without a message may stand between two messages.
- One response is one line per content block; they share `message.id`. Parallel tool calls and their results
  hang beside each other, so that no path through the tree holds them all: a response is therefore gathered
  by its id, and a result by the id of its call.
- A compact boundary is a root. If it kept messages, they hang below the new summary from then on.

The system prompt, the tools, and what Claude Code adds to requests are not in these files.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats.common import (
    FAILED_TOOL,
    Acted,
    Converted,
    Tally,
    Tools,
    actions,
    assistant,
    json_lines,
    json_text,
    naming_the_line,
    texts_of,
    tool_call,
)

MESSAGES = ("user", "assistant")  # types of lines; no request to the model holds another line as it is
ONLY_HERE = ("uuid", "sessionId", "leafUuid", "messageId")  # of these a line has at least one
SYNTHETIC = "<synthetic>"  # the model of an assistant line that Claude Code wrote itself


@dataclass(frozen=True)
class Line:
    """A line of the tree."""

    number: int
    where: str
    uuid: str
    parent: str | None
    kind: str
    row: dict[str, Any]

    @cached_property
    def blocks(self) -> list[dict[str, Any]]:
        """The content blocks of the line's message."""
        content = self.row["message"]["content"]
        return as_blocks([content] if isinstance(content, str) else content)

    @cached_property
    def results(self) -> dict[str, Converted]:
        """The results of tool calls in a user line, by the id of the call."""
        results = dict[str, Converted]()
        for block in self.blocks:
            if block.get("type") == "tool_result":
                call_id = block["tool_use_id"]
                results.setdefault(call_id, _result(call_id, block))
        return results

    @cached_property
    def said(self) -> list[Converted]:
        """What a user line says beside results, as one message or none."""
        others = [block for block in self.blocks if block.get("type") != "tool_result"]
        texts, lost = texts_of(others)
        return [Converted({"role": "user", "content": "\n\n".join(texts)}, lost)] if others else []

    def messages(self, calls: Container[str]) -> list[Converted]:
        """A user line as messages, without the results of `calls`, which follow their response."""
        return [result for call_id, result in self.results.items() if call_id not in calls] + self.said


@dataclass
class Response:
    """One response of the model, gathered from its lines."""

    key: str
    lines: list[Line] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the id of the call
    lost: str | None = None
    is_truncated: bool = False

    def add_text(self, text: str, tally: Tally) -> None:
        """Append a text. A line may have one again, or the whole of one that another has in part."""
        if any(one.startswith(text) for one in self.texts):
            tally.lines["text that another line of its response has"] += 1
        elif self.texts and self.texts[-1] and text.startswith(self.texts[-1]):
            self.texts[-1] = text
            tally.lines["text that another line of its response has"] += 1
        else:
            self.texts.append(text)

    @cached_property
    def converted(self) -> Converted:
        """The response as an assistant message, when all its lines are there."""
        return Converted(assistant("\n\n".join(self.texts), list(self.calls.values())), self.lost)


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line of a session file."""
    return "type" in row and not row.keys().isdisjoint(ONLY_HERE)


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each response of the model in a session file, with the messages before it."""
    session = Session(json_lines(path, label, tally), tally)
    for response in session.responses.values():
        first = response.lines[0]
        with naming_the_line(first.where):
            chain = session.chain(first)
            before = session.messages(chain or [], first.number)
            observed, is_cut = response.converted, response.is_truncated
        if chain is None and not is_cut:
            tally.actions["its history is not in the file"] += 1
            continue
        yield from actions(before, observed, tools, first.where, None, response.key, tally, is_cut=is_cut)


class Session:
    """The lines of a session file, its responses, and the results of its tool calls."""

    def __init__(self, rows: Iterable[tuple[str, dict[str, Any]]], tally: Tally) -> None:
        self.lines: dict[str, Line] = {}
        self.responses: dict[str, Response] = {}  # by message.id, in the order of their first lines
        self.response_of: dict[str, Response] = {}  # by the uuid of each of their lines
        self.results: dict[str, list[Line]] = defaultdict(list)  # by the id of the call
        self.moved: list[tuple[int, str, str]] = []  # from this line on, this uuid has this parent
        for where, row in rows:
            with naming_the_line(where):
                self._add(where, row, tally)

    def _add(self, where: str, row: dict[str, Any], tally: Tally) -> None:
        kind = row["type"]
        if kind not in MESSAGES:
            inner = row.get("attachment") if kind == "attachment" else None
            detail = inner.get("type") if isinstance(inner, dict) else row.get("subtype")
            tally.lines[f"{kind} {detail}" if isinstance(detail, str) else kind] += 1
            if "uuid" not in row:
                return
        uuid, parent = row["uuid"], row.get("parentUuid")
        if uuid in self.lines:
            tally.lines["line whose uuid an earlier line has"] += 1
            return
        line = Line(int(where.rpartition(":")[2]), where, uuid, parent, kind, row)
        self.lines[uuid] = line
        if kind == "system":
            self._add_boundary(line)
        elif kind == "assistant":
            self._add_response_line(line, tally)
        elif kind == "user":
            line.messages(())  # now, so that a wrong value is an error of this line
            for call_id in line.results:
                self.results[call_id].append(line)

    def _add_boundary(self, line: Line) -> None:
        """Note which messages a compact boundary kept, and below what."""
        metadata = line.row.get("compactMetadata") or {}
        segment, kept = metadata.get("preservedSegment") or {}, metadata.get("preservedMessages") or {}
        head = segment.get("headUuid") or next(iter(kept.get("uuids") or ()), None)
        anchor = segment.get("anchorUuid") or kept.get("anchorUuid")
        if head and anchor:
            self.moved.append((line.number, head, anchor))

    def _add_response_line(self, line: Line, tally: Tally) -> None:
        message = line.row["message"]
        if line.row.get("isApiErrorMessage") or message.get("model") == SYNTHETIC:
            tally.lines["assistant line that the model did not write"] += 1
            return
        key = message.get("id") or line.uuid
        response = self.responses.setdefault(key, Response(key))
        self.response_of[line.uuid] = response
        response.lines.append(line)
        response.is_truncated |= message.get("stop_reason") == "max_tokens"
        for block in line.blocks:
            kind = block.get("type")
            if kind == "text":
                response.add_text(block["text"], tally)
            elif kind == "tool_use":
                call_id, arguments = block["id"], json_text(block.get("input") or {})
                response.calls[call_id] = tool_call(call_id, block["name"], arguments)
            elif kind in ("thinking", "redacted_thinking"):
                tally.lines["thinking block (left out of the states)"] += 1
            else:  # of a tool that the provider's server ran, for one
                response.lost = f"content of the type {kind}"

    def chain(self, line: Line) -> list[Line] | None:
        """The lines above a line, from the root down; None if one of them is missing."""
        chain, seen, one = list[Line](), {line.uuid}, line
        while (parent := self._parent(one, line.number)) is not None:
            if parent in seen:
                raise DataError(line.where, "its parentUuid leads back to itself", "repair the log")
            if parent not in self.lines:
                return None
            seen.add(parent)
            one = self.lines[parent]
            chain.append(one)
        return chain[::-1]

    def _parent(self, line: Line, now: int) -> str | None:
        for number, head, anchor in reversed(self.moved):
            if line.uuid == head and number < now:
                return anchor
        return line.parent

    def messages(self, chain: list[Line], now: int) -> list[Converted]:
        """The lines of a chain as messages: all calls of each response, and the results before line `now`."""
        found, gathered, on_chain = list[Converted](), set[str](), {line.uuid for line in chain}
        responses = [self.response_of[line.uuid] for line in chain if line.uuid in self.response_of]
        calls = {call_id for response in responses for call_id in response.calls}
        for line in chain:
            if (response := self.response_of.get(line.uuid)) is not None:
                if response.key not in gathered:
                    gathered.add(response.key)
                    found += self._turn(response, calls, on_chain, now)
            elif line.kind == "user" and (
                # A hidden line (isMeta) is part of a request, and a note of the display is not.
                line.row.get("isCompactSummary") or not line.row.get("isVisibleInTranscriptOnly")
            ):
                found += line.messages(calls)
        return found

    def _turn(self, response: Response, calls: set[str], on_chain: set[str], now: int) -> list[Converted]:
        """A response and the results of its calls; a response of thinking alone leaves nothing behind."""
        converted = response.converted
        if not converted.lost and not converted.message["content"] and not response.calls:
            return []
        found, beside = [converted], dict[str, Line]()
        for call_id in response.calls:
            first = response.lines[0].number  # an id may be that of another call too
            results = [line for line in self.results[call_id] if first < line.number < now]
            if results:
                line = next((one for one in results if one.uuid in on_chain), results[0])
                found.append(line.results[call_id])
                if line.uuid not in on_chain:
                    beside[line.uuid] = line
        return found + [one for line in beside.values() for one in line.messages(calls)]


def _result(call_id: str, block: dict[str, Any]) -> Converted:
    content = block.get("content")
    blocks = as_blocks([content or ""] if content is None or isinstance(content, str) else content)
    texts, lost = texts_of(blocks)
    # Chat messages have no field for an error, so the text says it.
    text = "\n".join([FAILED_TOOL, *texts] if block.get("is_error") is True else texts)
    return Converted({"role": "tool", "tool_call_id": call_id, "content": text}, lost)


def as_blocks(content: Sequence[Any]) -> list[Any]:
    """Content with its strings as blocks of text."""
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in content]
