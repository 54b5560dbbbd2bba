"""The data-set columns of the hint and replay channels: what a row may contain, checked before training.

privileged_context   the hint: a string or messages; None for a row without one
chosen, rejected     one pair, or equal-length lists of pairs; a side is a string or messages
n_teachers_agreeing  optional weight >= 0 of the pair, or one per pair; None is 1
tools                optional: the tools that the pairs' prompt shows, a list of JSON schemas or its JSON text
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from composer_plugins.errors import ConfigError, DataError

HINT = "privileged_context"
CHOSEN, REJECTED, AGREEING = "chosen", "rejected", "n_teachers_agreeing"
TOOLS = "tools"

MAX_AGREEING = 1e6  # a count of teachers; more is a mistake, and could overflow a float32 loss

Row = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]
Completion = Prompt


class Pair(NamedTuple):
    """Two completions of one prompt, and how much their order counts."""

    chosen: Completion
    rejected: Completion
    weight: float
    texts: tuple[str, str]  # of both


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or content blocks of type text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        return "".join(block["text"] for block in content)
    raise DataError("message content", f"it is {_short(content)}", "write a string or blocks of text")


def text_of(side: Completion) -> str:
    """The text of a string, or of messages joined by line breaks, with their tool calls as JSON."""
    return side if isinstance(side, str) else "\n".join(map(_message_text, side))


def _message_text(message: Row) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    text = "" if content is None and calls else content_text(content)
    return text + json.dumps(calls, sort_keys=True, default=str) if calls else text


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates take them.

    A key that is None is left out: parquet files have every key in every message. Blocks of text are one
    text. The arguments of a tool call are an object, which OpenAI's logs have as JSON text. A tool call
    without text has the content "".
    """
    made = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        if "content" in kept:
            kept["content"] = content_text(kept["content"])
        if "tool_calls" in kept:
            kept = {"content": "", **kept, "tool_calls": [_tool_call(call) for call in kept["tool_calls"]]}
        made.append(kept)
    return made


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        remedy = 'write {"type": "function", "function": {"name": ..., "arguments": ...}}'
        raise DataError("tool_calls", f"one of them is {_short(call)}", remedy)
    given = function.get("arguments") or {}
    arguments = _parsed(given) if isinstance(given, str) else _without_none(given)
    if not isinstance(arguments, Mapping):
        problem = f"the arguments of {function['name']} are {_short(given)}"
        raise DataError("tool_calls", problem, "write an object, or its JSON text")
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """A JSON text as a value; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without_none(value: Any) -> Any:
    """A value without the keys that are None: parquet files add the keys of other rows' objects."""
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return value


def check_calls_are_shown(completion: list[dict[str, Any]], text: str) -> None:
    """Raise DataError if a tool call of a completion is not in its text, which a chat template made."""
    names = (call["function"]["name"] for message in completion for call in message.get("tool_calls") or ())
    if missing := [name for name in names if name not in text]:
        problem = f"it does not show the call of {missing[0]}"
        raise DataError("chat template", problem, "set one that shows tool calls, or remove the pair")


def tools_of(row: Row, prompt: Prompt) -> list[dict[str, Any]] | None:
    """The tools that the prompt of the row's pairs shows; None if the row does not say."""
    value = row.get(TOOLS)
    tools = _parsed(value) if isinstance(value, str) else _without_none(value)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise DataError(TOOLS, f"it is {_short(value)}", "write a list of JSON schemas, or its JSON text")
    if tools and isinstance(prompt, str):
        problem = "the prompt is a string, and only a chat template shows tools"
        raise DataError(TOOLS, problem, "write the prompt as messages, or None for tools")
    return tools


def prompt_of(row: Row) -> Any:
    """The row's prompt: a string that is not empty, or messages."""
    prompt = row.get("prompt")
    if not _is_side(prompt) or prompt == "":
        raise DataError("prompt", f"it is {_short(prompt)}", "write a string that is not empty, or messages")
    return prompt


def hinted_prompt(prompt: Prompt, hint: str | None, template: str) -> Prompt:
    """The prompt as the teacher sees it: `template` filled in, in the last user message of a chat."""
    return prompt if hint is None else filled_prompt(prompt, template, privileged_context=hint)


def filled_prompt(prompt: Prompt, template: str, **fields: str) -> Prompt:
    """The prompt with `template` in its place; in a chat, in the place of the last user message's text."""
    if isinstance(prompt, str):
        return template.format(prompt=prompt, **fields)
    last = _last_user_message(prompt)
    content = template.format(prompt=content_text(prompt[last]["content"]), **fields)
    return [*prompt[:last], {**prompt[last], "content": content}, *prompt[last + 1 :]]


def _last_user_message(prompt: list[dict[str, Any]]) -> int:
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        problem = "it has no user message, which a hint is written into"
        raise DataError("prompt", problem, "add a user message")
    return last


def hint_of(row: Row) -> str | None:
    """The row's hint as text, None if it has none."""
    value = row.get(HINT)
    if value is None:
        return None
    if not _is_side(value):
        raise DataError(HINT, f"it is {_short(value)}", "write a string, messages, or None")
    text = text_of(value)
    if not text.strip():
        raise DataError(HINT, "it is empty", "write None for a row without a hint")
    return text


def pairs_of(row: Row) -> list[Pair]:
    """The row's pairs, in order. A row may have no pair."""
    chosen, rejected = _sides(row, CHOSEN), _sides(row, REJECTED)
    if len(chosen) != len(rejected):
        problem = f"it has {len(chosen)} completions, and {REJECTED} has {len(rejected)}"
        raise DataError(CHOSEN, problem, "write as many of each")
    texts = {name: list(map(text_of, sides)) for name, sides in ((CHOSEN, chosen), (REJECTED, rejected))}
    for name, written in texts.items():
        if not all(map(str.strip, written)):
            raise DataError(name, "it is empty", "remove the pair, or write None for both sides")
    weights = _weights(row.get(AGREEING), len(chosen))
    both = zip(*texts.values(), strict=True)
    return [Pair(*pair) for pair in zip(chosen, rejected, weights, both, strict=True)]


def completion_messages(side: Completion) -> list[dict[str, Any]]:
    """A completion in a chat as messages for its template. The first message is the assistant's."""
    answer = [{"role": "assistant", "content": side}] if isinstance(side, str) else template_messages(side)
    if answer[0].get("role") != "assistant":
        problem = f"a completion starts with the role {answer[0].get('role')!r}"
        raise DataError("role", problem, "start it with the role 'assistant'")
    return answer


def after_prompt(whole: list[int], prompt: list[int]) -> list[int]:
    """The token ids that a completion adds to the token ids of its prompt, in a chat."""
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        problem = "it renders prompt + completion differently from the prompt alone, so the tokens of the "
        problem += "completion are not known"
        raise DataError("chat template", problem, "use a prefix-preserving chat template")
    return whole[len(prompt) :]


# What the rows of a channel are counted in, and what such a row has.
UNITS = {
    "hint": ("hint", "a hint", (HINT,)),
    "replay": ("pair", "a pair with a weight above 0", (CHOSEN, REJECTED)),
}
NOT_HINTS = ("none", "null", "nan")  # in any case: what was missing, written as text
# What is accepted and is probably a mistake. The words after "in 2 of 7 hints" or "pairs", and the remedy.
DOUBTS = {
    "absent": ("the text is {what}", "write None in a row without a hint"),
    "prompt": ("the text is the prompt", "write what the teacher knows in addition to the prompt, or None"),
    "same": (
        "the teacher's prompt has the same tokens as the policy's",
        "set a chat template, and a teacher_prompt_template, that show the whole hint",
    ),
    "equal": ("chosen equals rejected", "remove these pairs, which teach nothing"),
    "repeats": (
        "chosen and rejected begin with the text of the prompt",
        "write the completion alone, because it is appended to the prompt",
    ),
    "token": (
        "chosen or rejected contains {what}",
        "write the text alone: the chat template adds its tokens",
    ),
    "endless": (
        "chosen or rejected does not end with a token that ends generation ({what})",
        "set a chat template that writes one after a completion, as TRL's get_training_chat_template has for "
        "GLM, or set tokenizer.eos_token to what the template writes there: otherwise the policy learns not "
        "to end",
    ),
}


def hint_notes(row: Row, prompt: Prompt) -> list[str]:
    """Return "hint" for a row with a hint, and a key of DOUBTS, with what it is about, for each doubt."""
    if (hint := hint_of(row)) is None:
        return []
    hint = hint.strip()
    absent = [f"absent {hint!r}"] if hint.lower() in NOT_HINTS else []
    return ["hint", *absent, *(["prompt"] if hint == _asked(prompt) else [])]


def pair_notes(pairs: Iterable[Pair], prompt: Prompt, special_tokens: Collection[str]) -> list[str]:
    """Return "pair" for each pair with a weight above 0, and its doubts, as `hint_notes` has them."""
    notes, asked = [], _asked(prompt)
    for pair in pairs:
        if pair.weight > 0:
            chosen, rejected = pair.texts
            begins = chosen.lstrip().startswith(asked) and rejected.lstrip().startswith(asked)
            equal = ["equal"] if chosen == rejected else []
            repeats = ["repeats"] if asked and begins else []
            inside = [f"token {token!r}" for token in special_tokens if token in chosen or token in rejected]
            notes += ["pair", *equal, *repeats, *inside[:1]]
    return notes


def _asked(prompt: Prompt) -> str:
    """The text of a prompt, in a chat of its last user message; "" if it has none."""
    if not isinstance(prompt, str):
        prompt = next((content_text(m["content"]) for m in reversed(prompt) if m["role"] == "user"), "")
    return prompt.strip()


def special_tokens(tokenizer: Any) -> list[str]:
    """The tokenizer's special tokens, including the tokens of its chat template."""
    added = (token for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special)
    return sorted({*tokenizer.all_special_tokens, *map(str, added)})


def warnings_of(notes: Sequence[Collection[str]], channel: str, name: str, unless: str = "") -> Iterator[str]:
    """A warning if the channel uses no row of the data set, and one for each doubt, with its first row.

    `unless` says what else may fill the columns, after the data set was read.
    """
    unit, wanted, needed = UNITS[channel]
    found = [(*note.partition(" ")[::2], i) for i, row in enumerate(notes) for note in row]
    total = len([kind for kind, _, _ in found if kind == unit])
    if not total:
        loss = f"0 unless {unless}" if unless else "always 0"
        yield (
            f"{name}: none of its {len(notes)} rows has {wanted}, so the {channel} loss is {loss}; "
            f"fill the columns {', '.join(needed)}, or set {channel}_weight=0"
        )
    for doubt, (problem, remedy) in DOUBTS.items():
        if rows := [(what, i) for kind, what, i in found if kind == doubt]:
            what, first = rows[0]
            problem = f"in {len(rows)} of {total} {unit}s {problem.format(what=what)}, first in row {first}"
            yield f"{name}: {problem}; {remedy}"


def rows_of(dataset: Any, columns: tuple[str, ...], weight: str, name: str) -> Iterator[tuple[str, Row]]:
    """Every row with a label for its errors, after a check that it has the columns that `weight` needs.

    Of a streamed data set only the first row is yielded.
    """
    rows = iter(dataset)
    first = next(rows, None)
    if first is None:
        raise DataError(name, "it has no rows", "add rows to it")
    for column in columns:
        if column not in first:
            problem = f"it needs the column {column!r}, and {name} has {', '.join(sorted(first))}"
            remedy = f"add the column (None in rows without one), or set {weight}=0"
            raise ConfigError(weight, problem, remedy)
    yield f"{name} row 0", first
    for i, row in enumerate([] if is_streamed(dataset) else rows, start=1):
        yield f"{name} row {i}", row


def is_streamed(dataset: Any) -> bool:
    """Whether the data set is streamed, so that rows cannot be checked before training."""
    return not hasattr(dataset, "__len__")


def _is_side(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    messages = [m for m in value if isinstance(m, Mapping) and ("content" in m or m.get("tool_calls"))]
    return len(messages) == len(value)


def _sides(row: Row, column: str) -> list[Completion]:
    value = row.get(column)
    if value is None:
        return []
    if _is_side(value):
        return [value]
    if isinstance(value, list):
        sides = [side for side in value if isinstance(side, str) or _is_side(side)]
        if len(sides) == len(value):
            return sides
    remedy = "write a string, messages, a list of either, or None"
    raise DataError(column, f"it is {_short(value)}", remedy)


def _weights(value: Any, count: int) -> list[float]:
    weights = value if isinstance(value, list) else [value] * count
    if len(weights) != count:
        raise DataError(AGREEING, f"it has {len(weights)} values for {count} pairs", "write one per pair")
    weights = [1.0 if w is None else w for w in weights]
    for w in weights:
        if not isinstance(w, int | float) or isinstance(w, bool) or not 0 <= w <= MAX_AGREEING:
            raise DataError(AGREEING, f"it is {w!r}", f"write a number from 0 to {MAX_AGREEING:g}")
    return [float(w) for w in weights]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
