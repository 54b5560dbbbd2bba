"""States: the points of a trace at which the model acted, and the file that holds them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.recipes.shared import replace_file

Message = dict[str, Any]
CUT_OFF = "length"  # the finish_reason of an answer that reached its limit of tokens


class _Function(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCall(BaseModel):
    """What a tool call in a message has at least."""

    id: str
    function: _Function


@dataclass(frozen=True)
class State:
    """A point of a trace at which the model acted."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    id: str  # 16 hex digits of the sha256 of messages and tools: two traces may share a state
    messages: list[Message]  # OpenAI chat messages before the action
    tools: list[dict[str, Any]] | None  # OpenAI function tools: {"type": "function", "function": {...}}
    observed: Message  # the assistant message that the trace has here; arguments of its calls are JSON text
    source: str  # "file:line" of the action
    outcome: float | None  # the outcome signal of the trace, where the log has one


STATE = TypeAdapter(State)


def canonical(value: Any) -> str:
    """A value as JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object of a text; None if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def state_id(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    """The id of the state with these messages and tools."""
    return hashlib.sha256(canonical([messages, tools]).encode()).hexdigest()[:16]


def write_text(path: Path, text: str) -> None:
    """Write a text file as `replace_file` does."""
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_states(states: Iterable[State], path: Path) -> None:
    """Write the states, one in a line."""
    write_text(path, text_of(states))


def text_of(states: Iterable[State]) -> str:
    """The text of a file of states."""
    return "".join(json.dumps(vars(state), ensure_ascii=False) + "\n" for state in states)


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, after its place in the line or the answer."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def read_states(path: Path) -> list[State]:
    """The states of a file that `write_states` has written."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        problem = f"it cannot be read ({in_a_line(error)})"
        raise ConfigError(str(path), problem, "run the command `states` first") from None
    states = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            states.append(STATE.validate_json(line))
        except ValidationError as error:
            problem = f"it is no state: {first_problem(error)}"
            raise DataError(f"{path}:{number}", problem, "run the command `states` again") from None
    return states
