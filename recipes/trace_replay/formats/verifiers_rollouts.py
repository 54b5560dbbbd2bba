"""Rollouts that the verifiers library saves: `results.jsonl` up to 0.3, `traces.jsonl` from 0.4 on.

A line of `results.jsonl` has prompt, completion and reward, and a trajectory if the run kept it: its steps
have the messages of each request, which an environment may have rewritten. A line of `traces.jsonl` is an
episode with a trace for each agent. Its messages are a graph; the actions are the nodes that were sampled.
The reward is the outcome of every action of its rollout. A rollout that ended with an error is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_plugins.errors import DataError
from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Tally,
    Tools,
    actions,
    chat_message,
    expected,
    finite,
    function_tools,
    json_lines,
    unknown_line,
)
from composer_plugins.recipes.trace_replay.formats.openai_chat import of_messages
from composer_plugins.recipes.trace_replay.states import CUT_OFF

TRACE_VERSION = 1  # of verifiers 0.4.0
FAILED = "rollout that ended with an error"


def recognises(row: dict[str, Any]) -> bool:
    """Whether this is a line of a file with rollouts."""
    return "traces" in row or {"prompt", "completion"} <= row.keys()


def read(path: Path, label: str, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each action in a file of rollouts; `tools` stands in where a rollout has none."""
    for where, row in json_lines(path, label, tally):
        if "traces" in row:
            for i, trace in enumerate(expected(where, row["traces"], list, "traces")):
                yield from _of_trace(where, i, expected(where, trace, dict, "a trace"), tools, tally)
        elif recognises(row):
            yield from _of_rollout(where, row, tools, tally)
        else:
            raise unknown_line(where, f"a line of rollouts has the fields {', '.join(sorted(row))}")


def _of_rollout(where: str, row: dict[str, Any], tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    if row.get("error"):
        tally.lines[FAILED] += 1
        return
    outcome, tools = finite(where, row.get("reward")), function_tools(where, row.get("tool_defs")) or tools
    is_truncated = bool(row.get("is_truncated"))
    trajectory = row.get("trajectory")
    steps = expected(where, trajectory, list, "trajectory") if trajectory else [row]
    for i, step in enumerate(steps):
        prompt, completion = expected(where, step, dict, "a step").get("prompt"), step.get("completion")
        if not isinstance(prompt, list) or not isinstance(completion, list):
            tally.lines["rollout without chat messages"] += 1
            return
        if not completion:
            tally.lines["rollout with an empty completion"] += 1
        cut = bool(step.get("is_truncated")) or (is_truncated and i == len(steps) - 1)
        for acted in of_messages(
            where,
            prompt + completion,
            tools,
            tally,
            first=len(prompt),
            outcome=outcome,
            is_truncated=cut,
        ):
            yield acted._replace(key=f"{acted.key}/{i}")


def _of_trace(
    where: str, index: int, trace: dict[str, Any], tools: Tools | None, tally: Tally
) -> Iterator[Acted]:
    if trace.get("version", TRACE_VERSION) != TRACE_VERSION:
        raise unknown_line(where, f"a trace has the version {trace['version']!r}, known is {TRACE_VERSION}")
    if not trace.get("ok") or trace.get("errors"):
        tally.lines[FAILED] += 1
        return
    nodes = expected(where, trace.get("nodes") or [], list, "nodes")
    messages = [
        chat_message(where, expected(where, node, dict, "a node").get("message"), tally) for node in nodes
    ]
    calls = expected(where, trace.get("calls") or [], list, "calls")
    cut = {call.get("node") for call in calls if call.get("finish_reason") == CUT_OFF}
    outcome = _reward(where, trace)
    for i, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        path = _path(where, nodes, i)
        before, own = [messages[one] for one in path], nodes[(*path, i)[0]].get("tools") or trace.get("tools")
        offered, key = function_tools(where, own) or tools, f"{where}/{index}/{i}"
        yield from actions(before, messages[i], offered, where, outcome, key, tally, is_cut=i in cut)


def _path(where: str, nodes: list[dict[str, Any]], last: int) -> list[int]:
    """The nodes above a node, from the root down."""
    path, one = list[int](), nodes[last].get("parent")
    while one is not None:
        if not isinstance(one, int) or not 0 <= one < len(nodes) or one in path or one == last:
            raise DataError(where, f"a node has the parent {one!r}", "repair the log")
        path.append(one)
        one = nodes[one].get("parent")
    return path[::-1]


def _reward(where: str, trace: dict[str, Any]) -> float | None:
    """The sum of weight times score, as verifiers has it; None if one was not computed."""
    rewards = expected(where, trace.get("rewards") or {}, dict, "rewards")
    if not rewards or any(one is None for one in rewards.values()):
        return None
    parts = [expected(where, one, dict, "a reward") for one in rewards.values()]
    return sum((finite(where, one.get("score")) or 0.0) * one.get("weight", 1.0) for one in parts)
