"""Preference pairs: where teachers agree on another action than the trace has, or where outcomes differ.

By agreement: each teacher votes for the action that it gave most often. The action of most teachers is chosen
over the one in the trace. By outcome: where several traces took different actions in one state, the action
with the best mean outcome is chosen over the one with the worst. README.md has all rules.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer_plugins.errors import unknown
from composer_plugins.recipes.trace_replay.journal import Answer
from composer_plugins.recipes.trace_replay.states import Message, State, canonical, json_object

Ignored = frozenset[tuple[str, str]]  # tools and their arguments that are not part of an action
WHOLE = ("stop", "tool_calls")  # values of finish_reason
AGREEMENT, OUTCOME = "agreement", "outcome"


class Pair(NamedTuple):
    """A row of the data set."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: str | None  # JSON
    n_teachers_agreeing: int | None  # the weight of the pair; None, which is weight 1, if outcomes made it
    n_teachers: int
    made_by: str
    state: str
    source: str


@dataclass
class Counts:
    """What became of the answers, and of the actions of the traces."""

    answers: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)


def ignored_arguments(names: Sequence[str], states: Sequence[State]) -> Ignored:
    """Arguments that are written as "Bash.description". Each must occur in the log, or it is misspelt."""
    occurring = {
        f"{call['function']['name']}.{argument}": (call["function"]["name"], argument)
        for state in states
        for call in state.observed.get("tool_calls", ())
        for argument in _arguments(call) or ()
    }
    for name in names:
        if name not in occurring:
            raise unknown("--ignore", name, occurring, noun="argument of a tool in these states")
    return frozenset(occurring[name] for name in names)


def make_pairs(
    states: Sequence[State],
    answers: Iterable[Answer],
    *,
    min_agree: int = 2,
    ignored: Ignored = frozenset(),
) -> tuple[list[Pair], Counts]:
    """The pairs of all states, in their order, and what became of the others."""
    counts, traces = Counts(), defaultdict[str, list[State]](list)
    for state in states:
        traces[state.id].append(state)
    by_state = defaultdict[str, list[Answer]](list)
    for answer in answers:
        if answer.state in traces:
            by_state[answer.state].append(answer)
        else:
            counts.answers["to a state that is not in states.jsonl"] += 1
    pairs = list[Pair]()
    for name, observed in traces.items():
        pairs += _pairs_of_state(observed, by_state[name], min_agree, ignored, counts)
    return pairs, counts


def _pairs_of_state(
    traces: list[State], answers: list[Answer], min_agree: int, ignored: Ignored, counts: Counts
) -> Iterator[Pair]:
    state, whole = traces[0], list[Answer]()
    for answer in answers:
        reason = _why_dropped(answer, state.tools)
        compared = "compared" if _names(answer.message) else "text alone, which agrees with nothing"
        counts.answers[f"dropped: {reason}" if reason else compared] += 1
        if not reason:
            whole.append(answer)
    majority = _majority(whole, min_agree, ignored)
    taken = defaultdict[Hashable, list[State]](list)
    for trace in traces:
        taken[_calls(trace.observed, ignored) or trace.observed["content"]].append(trace)
    by_outcome = _outcome_pair(taken)
    for action, same in taken.items():
        rejected = same[0].observed
        if by_outcome is not None and action == by_outcome[1]:
            chosen, agreeing, made_by, why_not = taken[by_outcome[0]][0].observed, None, OUTCOME, ""
        else:
            chosen, agreeing, made_by = majority.message, majority.agreeing, AGREEMENT
            why_not = _why_not(majority, action, taken)
        if not why_not and not (_has_json_arguments(chosen) and _has_json_arguments(rejected)):
            why_not = "the arguments of a tool call are not a JSON object"
        counts.actions[why_not or f"pair by {made_by}"] += 1
        counts.actions["the same action was taken there before"] += len(same) - 1
        if not why_not:
            tools = None if state.tools is None else json.dumps(state.tools, ensure_ascii=False)
            more = (tools, agreeing, majority.voting, made_by, state.id, same[0].source)
            yield Pair(state.messages, [chosen], [rejected], *more)


def _why_dropped(answer: Answer, tools: list[dict[str, Any]] | None) -> str:
    """Why an answer can be neither compared nor trained on; empty if it can."""
    if answer.finish_reason not in WHOLE:
        return f"it ended with finish_reason {answer.finish_reason}"
    if not _names(answer.message) <= {tool["function"]["name"] for tool in tools or ()}:
        return "it calls a tool that the state does not have"
    return ""


def _why_not(majority: "Majority", action: Hashable, taken: Mapping[Hashable, list[State]]) -> str:
    """Why the majority is not chosen over an action of the trace; empty if it is."""
    if majority.why_not:
        return majority.why_not
    if action == majority.action:
        return "the teachers agree with the trace"
    trace = taken[action][0]
    if not _names(trace.observed) <= {tool["function"]["name"] for tool in trace.tools or ()}:
        return "the trace calls a tool that the teachers were not offered"
    own, chosen = _outcomes(taken[action]), _outcomes(taken.get(majority.action, ()))
    if any(outcome > 0 for outcome in own):
        return "the trace's action earned an outcome above 0"
    return "both actions were taken, and their outcomes do not make a pair" if own and chosen else ""


def _names(message: Message) -> set[str]:
    """The tools that a message calls."""
    return {call["function"]["name"] for call in message.get("tool_calls") or ()}


def _outcomes(traces: Iterable[State]) -> list[float]:
    return [one.outcome for one in traces if one.outcome is not None]


def _has_json_arguments(message: Message) -> bool:
    return all(_arguments(call) is not None for call in message.get("tool_calls") or ())


def _arguments(call: dict[str, Any]) -> dict[str, Any] | None:
    return json_object(call["function"]["arguments"])


def _calls(message: Message, ignored: Ignored) -> tuple[tuple[str, str], ...]:
    """The tool calls of a message as something to compare: a multiset of names and arguments.

    The order of keys and calls does not count. Invalid JSON is its text.
    """
    found = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], _arguments(call)
        if arguments is None:
            found.append((name, call["function"]["arguments"]))
        else:
            kept = {key: value for key, value in arguments.items() if (name, key) not in ignored}
            found.append((name, canonical(kept)))
    return tuple(sorted(found))


class Majority(NamedTuple):
    """The action of most teachers, or why there is none."""

    agreeing: int
    voting: int
    why_not: str = ""
    action: Hashable = None
    message: Message = {}


def _majority(answers: list[Answer], min_agree: int, ignored: Ignored) -> Majority:
    """Count one vote for each teacher: the action it gave most often, if there is one."""
    own, messages = defaultdict[str, Counter[Hashable]](Counter), dict[Hashable, Message]()
    for i, answer in enumerate(answers):
        action = _calls(answer.message, ignored) or i  # a text agrees with no other text
        own[answer.teacher][action] += 1
        messages.setdefault(action, answer.message)
    votes = Counter[Hashable]()
    for given in own.values():
        (first, number), *others = given.most_common(2)
        if not others or others[0][1] < number:
            votes[first] += 1
    if not votes:
        return Majority(0, 0, "no teacher gave an answer that can be compared")
    (top, number), *others = votes.most_common(2)
    if number < min_agree:
        return Majority(number, votes.total(), f"fewer than {min_agree} teachers agree")
    if others and others[0][1] == number:
        return Majority(number, votes.total(), "two actions have the most votes")
    return Majority(number, votes.total(), "", top, messages[top])


def _outcome_pair(taken: dict[Hashable, list[State]]) -> tuple[Hashable, Hashable] | None:
    """The actions with the best and the worst outcomes, if these are apart."""
    outcomes = {action: _outcomes(same) for action, same in taken.items()}
    means = {action: sum(values) / len(values) for action, values in outcomes.items() if values}
    if len(means) < 2:
        return None
    best, worst = max(means, key=lambda one: means[one]), min(means, key=lambda one: means[one])
    return (best, worst) if min(outcomes[best]) > max(outcomes[worst]) else None
