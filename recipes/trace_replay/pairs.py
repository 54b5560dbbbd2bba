"""Preference pairs: where teachers agree on another action than the trace has, or where outcomes differ.

An action is the multiset of its tool calls: their names and arguments, whatever the order of keys and calls,
and without the text beside them. An argument that only comments, as the description of Claude Code's Bash,
can be left out. Texts of teachers are never the same action, unless a judge groups them.

By agreement: each teacher votes for the action that it gave most often. The action of most teachers is chosen
over the one in the trace if enough teachers voted for it, no other action has as many votes, and it is not
the trace's. An action that some trace took and that earned an outcome above 0 is never rejected so.

By outcome: where several traces took different actions in one state, the action with the best mean outcome
is chosen over the one with the worst, if each of its traces did better than each of the other's. No teacher
is needed, and such a pair stands in place of one by agreement.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError, DataError, in_a_line, unknown
from composer_plugins.losses.derived import function_of_import_path
from composer_plugins.recipes.trace_replay.journal import Answer
from composer_plugins.recipes.trace_replay.states import CUT_OFF, Message, State, canonical

Judge = Callable[[State, list[Message]], list[Hashable]]
Ignored = frozenset[tuple[str, str]]  # tools and their arguments that are not part of an action
Action = tuple[str, Hashable]  # ("calls", canonical calls) or ("text", the judge's group, or the text)

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
    """What became of the answers and the states."""

    answers: Counter[str] = field(default_factory=Counter)  # why an answer was dropped
    states: Counter[str] = field(default_factory=Counter)  # what each state and action led to
    votes: Counter[tuple[int, int]] = field(default_factory=Counter)  # of (agreeing, voting) teachers


def find_judge(path: str) -> Judge:
    """The judge at an import path, "package.module:function"."""
    try:
        return function_of_import_path(path, "--judge")
    except ConfigError as error:
        remedy = (
            "name a function as package.module:function, and run this command in the folder that holds the "
            "module, or put that folder into PYTHONPATH"
        )
        raise ConfigError("--judge", error.problem, remedy) from None


def ignored_arguments(names: Sequence[str], states: Sequence[State]) -> Ignored:
    """Arguments that are written as "Bash.description". Each must occur in the log, or it is misspelt."""
    occurring = {
        f"{call['function']['name']}.{argument}"
        for state in states
        for call in state.observed.get("tool_calls", ())
        for argument in _arguments(call) or ()
    }
    for name in names:
        if name not in occurring:
            raise unknown("--ignore", name, occurring, noun="argument of a tool in these states")
    split = (name.rpartition(".") for name in names)
    return frozenset((tool, argument) for tool, _, argument in split)


def make_pairs(
    states: Sequence[State],
    answers: Iterable[Answer],
    *,
    min_agree: int = 2,
    judge: Judge | None = None,
    ignored: Ignored = frozenset(),
) -> tuple[list[Pair], Counts]:
    """The pairs of all states, in their order, and what became of the others."""
    if min_agree < 2:
        problem = f"it is {min_agree}, and one teacher alone agrees with nobody"
        raise ConfigError("--min-agree", problem, "set 2 or more")
    counts, by_state = Counts(), defaultdict[str, list[Answer]](list)
    for answer in answers:
        by_state[answer.state].append(answer)
    traces = defaultdict[str, list[State]](list)
    for state in states:
        traces[state.id].append(state)
    pairs = list[Pair]()
    for name, observed in traces.items():
        pairs += _pairs_of_state(observed, by_state[name], min_agree, judge, ignored, counts)
    return pairs, counts


def _pairs_of_state(
    traces: list[State],
    answers: list[Answer],
    min_agree: int,
    judge: Judge | None,
    ignored: Ignored,
    counts: Counts,
) -> Iterator[Pair]:
    state = traces[0]
    whole = [answer for answer in answers if _is_whole(answer, state.tools, judge, counts)]
    given, seen = [answer.message for answer in whole], [trace.observed for trace in traces]
    asked = _actions(state, given, seen, judge, ignored)
    taken = defaultdict[Action, list[State]](list)
    for trace, action in zip(traces, asked[len(whole) :], strict=True):
        taken[action].append(trace)
    majority = _majority(whole, asked[: len(whole)], min_agree)
    counts.votes[majority.agreeing, majority.voting] += 1
    by_outcome = _outcome_pair(taken)
    for action, same in taken.items():
        if by_outcome is not None and action == by_outcome[1]:
            result, made_by, better = "pair by outcome", OUTCOME, taken[by_outcome[0]][0].observed
        else:
            result = _why_not(majority, action, taken)
            made_by, better = AGREEMENT, majority.message
        if not result or made_by == OUTCOME:
            unreadable = not (_has_json_arguments(same[0].observed) and _has_json_arguments(better))
            result = "the arguments of a tool call are not a JSON object" if unreadable else result
            if not unreadable:
                agreeing = majority.agreeing if made_by == AGREEMENT else None
                tools = None if state.tools is None else json.dumps(state.tools, ensure_ascii=False)
                sides, first = ([better], [same[0].observed]), same[0]
                yield Pair(
                    state.messages, *sides, tools, agreeing, majority.voting, made_by, state.id, first.source
                )
        counts.states[result or "pair by agreement"] += 1
        counts.states["the same action was taken there before"] += len(same) - 1


def _why_not(majority: "Majority", action: Action, taken: Mapping[Action, list[State]]) -> str:
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


def _is_whole(
    answer: Answer, tools: list[dict[str, Any]] | None, judge: Judge | None, counts: Counts
) -> bool:
    """Whether an answer can be compared and trained on; if not, its reason is counted."""
    calls = answer.message.get("tool_calls") or []
    reason = None
    if answer.finish_reason == CUT_OFF:
        reason = "it was cut at the limit of tokens"
    elif answer.finish_reason not in WHOLE:
        reason = f"it ended with finish_reason {answer.finish_reason}"
    elif not calls and not (answer.message.get("content") or "").strip():
        reason = "it is empty"
    elif not _has_json_arguments(answer.message):
        reason = "the arguments of its tool call are not a JSON object"
    elif not _names(answer.message) <= {tool["function"]["name"] for tool in tools or ()}:
        reason = "it calls a tool that the state does not have"
    compared = "compared" if calls or judge else "text alone, which agrees with nothing without a judge"
    counts.answers[f"dropped: {reason}" if reason else compared] += 1
    return reason is None


def _has_json_arguments(message: Message) -> bool:
    return all(_arguments(call) is not None for call in message.get("tool_calls") or ())


def _arguments(call: dict[str, Any]) -> dict[str, Any] | None:
    try:
        value = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _actions(
    state: State, answers: list[Message], observed: list[Message], judge: Judge | None, ignored: Ignored
) -> list[Action]:
    """What each message does. Without a judge a teacher's text is like no other text."""
    messages, groups = [*answers, *observed], dict[int, Hashable]()
    texts = [i for i, message in enumerate(messages) if not message.get("tool_calls")]
    if judge is not None and texts:
        groups = dict(zip(texts, _judged(state, [messages[i] for i in texts], judge), strict=True))
    actions = list[Action]()
    for i, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            actions.append(("calls", tuple(sorted(_call(call, ignored) for call in calls))))
        elif judge is not None:
            actions.append(("text", groups[i]))
        else:
            actions.append(("text", i if i < len(answers) else message["content"]))
    return actions


def _call(call: dict[str, Any], ignored: Ignored) -> tuple[str, str]:
    """A tool call as something to compare: 1 and 1.0 are the same number, invalid JSON is its text."""
    name, arguments = call["function"]["name"], _arguments(call)
    if arguments is None:
        return name, call["function"]["arguments"]
    kept = {key: value for key, value in arguments.items() if (name, key) not in ignored}
    return name, canonical(_whole_numbers(kept))


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _judged(state: State, messages: list[Message], judge: Judge) -> list[Hashable]:
    remedy = "return one hashable group for each message"
    try:
        groups = list(judge(state, messages))
        set(groups)
    except Exception as error:  # the judge is the user's code
        problem = f"it failed on the state {state.id} ({in_a_line(error)})"
        raise DataError("--judge", problem, remedy) from error
    if len(groups) != len(messages):
        problem = f"it returned {len(groups)} groups for {len(messages)} messages of the state {state.id}"
        raise DataError("--judge", problem, remedy)
    return groups


class Majority(NamedTuple):
    """The action of most teachers, or why there is none."""

    agreeing: int
    voting: int
    why_not: str = ""
    action: Action = ("", None)
    message: Message = {}


def _majority(answers: list[Answer], actions: list[Action], min_agree: int) -> Majority:
    """Count one vote for each teacher: the action it gave most often, if there is one."""
    own = defaultdict[str, Counter[Action]](Counter)
    for answer, action in zip(answers, actions, strict=True):
        own[answer.teacher][action] += 1
    votes = Counter[Action]()
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
    message = next(answer.message for answer, one in zip(answers, actions, strict=True) if one == top)
    return Majority(number, votes.total(), "", top, message)


def _outcome_pair(taken: dict[Action, list[State]]) -> tuple[Action, Action] | None:
    """The actions with the best and the worst outcomes, if these are apart."""
    outcomes = {action: _outcomes(same) for action, same in taken.items()}
    means = {action: sum(values) / len(values) for action, values in outcomes.items() if values}
    if len(means) < 2:
        return None
    best, worst = max(means, key=lambda one: means[one]), min(means, key=lambda one: means[one])
    return (best, worst) if min(outcomes[best]) > max(outcomes[worst]) else None
