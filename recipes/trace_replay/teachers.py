"""Teachers: models behind OpenAI-compatible endpoints, with prices, from a YAML file as README.md has it."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from composer_plugins.config import complaints
from composer_plugins.errors import ConfigError, error_of, in_a_line
from composer_plugins.recipes.trace_replay.openrouter import PRICES, WRITTEN, prices_of, read_models

OPTION = "--teachers"
LIMITS = ("max_tokens", "max_completion_tokens")
# The keys of a request that this recipe writes, or that would make it cost more than was reserved for it.
OWN_PARAMS = ("model", "messages", "tools", "stream", "n", "best_of", *LIMITS)
LOCAL_KEY = "none"  # the client wants a key, and a local server reads none

Text = Annotated[str, Field(min_length=1)]
Address = Annotated[str, Field(pattern="^https?://")]
Price = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]


class Teacher(BaseModel):
    """A model behind an OpenAI-compatible endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: Text  # the name in the journal and in the report
    model: Text
    base_url: Address
    api_key_env: Text | None = None
    usd_per_million_input: Price
    usd_per_million_output: Price
    usd_per_request: Price = 0.0
    prices: Literal["openrouter"] | None = None  # the three prices above are from its list of models
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    params: dict[str, JsonValue] = Field(default_factory=dict)
    timeout: float = Field(120.0, gt=0)  # seconds in which the endpoint sends nothing
    max_retries: int = Field(5, ge=0)

    def limit(self) -> dict[str, int]:
        """The limit of an answer's tokens, under the name that the entry gives it."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    def usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of a request."""
        cost = prompt_tokens * self.usd_per_million_input + completion_tokens * self.usd_per_million_output
        return cost / 1e6 + self.usd_per_request

    def api_key(self) -> str:
        """The key in the environment variable of the entry."""
        return LOCAL_KEY if self.api_key_env is None else os.environ.get(self.api_key_env, "").strip()


def load_teachers(path: Path) -> list[Teacher]:
    """The teachers of a YAML file; raises ConfigError for everything that can be wrong before a request."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read ({in_a_line(error)})"
        raise ConfigError(OPTION, problem, "name a YAML file of teachers") from None
    entries = data.get("teachers") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        problem = f"{path} has no list of teachers"
        raise ConfigError(OPTION, problem, "begin the file with `teachers:` and a list of entries")
    teachers, lists = list[Teacher](), dict[str, dict[str, Any]]()  # of models, by base_url
    for i, entry in enumerate(entries):
        teacher, key = _teacher(entry, f"teachers[{i}]"), f"teachers[{i}]"
        if teacher.prices is not None:
            url = teacher.base_url
            lists[url] = lists[url] if url in lists else read_models(url, key)
            prices = prices_of(teacher.model, teacher.params, lists[url], key)
            teacher = teacher.model_copy(update=prices)
        teachers.append(teacher)
    check_teachers(teachers)
    return teachers


def check_teachers(teachers: Sequence[Teacher]) -> None:
    """Raise ConfigError for no teacher, for two of one name, and for a key that is not set or not valid."""
    if not teachers:
        raise ConfigError("teachers", "the list is empty", "add at least one teacher")
    name, count = Counter(teacher.name for teacher in teachers).most_common(1)[0]
    if count > 1:
        problem = f"{count} teachers have the name {name!r}"
        raise ConfigError("teachers", problem, "give each teacher its own name")
    for teacher in teachers:
        where = f"teacher {teacher.name!r}, api_key_env"
        if not (key := teacher.api_key()):
            problem = f"the environment variable {teacher.api_key_env} is not set"
            remedy = f"run export {teacher.api_key_env}=... before, or name another variable"
            raise ConfigError(where, problem, remedy)
        if not (key.isascii() and key.isprintable()):  # an HTTP library would print it in its error
            problem = f"the environment variable {teacher.api_key_env} has a line break, or a character that "
            raise ConfigError(where, problem + "is not ASCII", "set the variable to the key alone")


def _teacher(entry: dict[str, Any], key: str) -> Teacher:
    if entry.get("prices"):
        if written := [name for name in WRITTEN if name in entry]:
            raise ConfigError(f"{key}.{written[0]}", f"prices is {PRICES} too", "remove one of them")
        entry = dict.fromkeys(WRITTEN, 0) | entry  # until the list of models is read
    try:
        teacher = Teacher.model_validate(entry)
    except ValidationError as error:
        if missing := [str(one["loc"][0]) for one in error.errors() if one["type"] == "missing"]:
            remedy = "add it to the entry; a price is in USD per million tokens, and 0 for a local server"
            raise ConfigError(f"{key}.{missing[0]}", "it is missing", remedy) from None
        raise error_of(complaints(error, Teacher.model_fields)).under(key) from None
    if len(teacher.limit()) != 1:
        problem = "an entry has either max_tokens or max_completion_tokens"
        raise ConfigError(f"{key}.max_tokens", problem, "set one of them, which bounds the cost of an answer")
    if taken := [name for name in OWN_PARAMS if name in teacher.params]:
        problem = "the recipe writes this key of a request itself"
        raise ConfigError(f"{key}.params.{taken[0]}", problem, "remove it")
    return teacher
