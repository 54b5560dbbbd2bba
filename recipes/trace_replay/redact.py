"""Secrets in states: found by the plugins of detect-secrets, and replaced before anything is written.

Its plugins of known forms are on, and its plugin of quoted values that are assigned to names like `api_key`.
The entropy plugins are off, because they would destroy hashes. Where a token or a private key ends is decided
here, because some of those plugins match only its beginning.

A secret is replaced wherever it occurs in the logs. A short one, or one of letters alone, is replaced only in
the line that it was found in, because the same letters may be an ordinary word elsewhere.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.filters import heuristic
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.ip_public import IPPublicDetector
from detect_secrets.plugins.keyword import QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP, KeywordDetector
from detect_secrets.plugins.private_key import PrivateKeyDetector

from composer_plugins.recipes.trace_replay.formats.common import Acted, json_text, without_lone_surrogates

NO_TOKENS = (IPPublicDetector, PrivateKeyDetector)
REST_OF_TOKEN = re.compile(r"[\w\-.+/=]*")
END_OF_KEY = r".*?(?:END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-*|\Z)"
PRIVATE_KEYS = [re.compile(one.pattern + END_OF_KEY, re.DOTALL) for one in PrivateKeyDetector.denylist]
FEWEST, SHORT = 4, 8  # characters


def redacted(actions: Sequence[Acted]) -> tuple[list[Acted], Counter[str]]:
    """The actions without secrets, and how many different secrets of each kind were found."""
    # The actions of a log share their messages and tools: each is looked at once.
    parts = {id(part): part for acted in actions for part in (*acted.messages, acted.tools, acted.observed)}
    kinds: dict[str, str] = {}  # of every secret

    def collect(text: str, name: str) -> str:
        for line in (*text.splitlines(), _assignment(name, text)):
            kinds.update(secrets_of_line(line))
        for pattern in PRIVATE_KEYS:
            kinds.update(dict.fromkeys(pattern.findall(text), PrivateKeyDetector.secret_type))
        return text

    def replace(text: str, name: str) -> str:
        here = {secret for secret in everywhere if secret in text}
        text = _replaced(text, {secret for secret in here if "\n" in secret}, kinds)
        own = {value for value, _ in secrets_of_line(_assignment(name, text))}
        lines = text.splitlines(keepends=True)
        found = [here | own | {value for value, _ in secrets_of_line(line.rstrip("\r\n"))} for line in lines]
        return "".join(_replaced(*one, kinds) for one in zip(lines, found, strict=True))

    for part in parts.values():
        _with_texts(part, collect)
    everywhere = {secret for secret in kinds if len(secret) >= SHORT and not secret.isalpha()}
    clean = {identity: _with_texts(part, replace) for identity, part in parts.items()}
    found = [
        acted._replace(
            messages=[clean[id(message)] for message in acted.messages],
            tools=clean[id(acted.tools)],
            observed=clean[id(acted.observed)],
        )
        for acted in actions
    ]
    return found, Counter(kinds.values())


def _with_texts(value: Any, function: Callable[[str, str], str], name: str = "") -> Any:
    """A JSON value with each text as `function(text, name of its field)`; arguments of calls stay JSON."""
    if isinstance(value, list):
        return [_with_texts(one, function, name) for one in value]
    if isinstance(value, dict):
        return {key: _with_texts(one, function, key) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    if name == "arguments":
        try:
            arguments = json.loads(value)
        except (ValueError, RecursionError):
            return function(value, name)
        clean = _with_texts(arguments, function)
        return value if clean == arguments else without_lone_surrogates(json_text(clean))
    return function(value, name)


def _assignment(name: str, text: str) -> str:
    """The field of an argument as a line: `"password": "..."`."""
    return f'"{name}": "{text}"' if "\n" not in text else ""


@cache
def secrets_of_line(line: str) -> list[tuple[str, str]]:
    """The secrets of a line with their kinds."""
    found = list[tuple[str, str]]()
    for kind, pattern in _forms():
        for match in pattern.finditer(line):
            start, end = match.span(match.lastindex or 0)  # a group is the secret, or its beginning
            rest = REST_OF_TOKEN.match(line, start)
            found.append((line[start : max(end, rest.end() if rest else 0)], kind))
    for pattern, group in QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP.items():
        values = (match.group(group) for match in pattern.finditer(line))
        found += [(value, KeywordDetector.secret_type) for value in values if _may_be_secret(value)]
    return found


@cache
def _forms() -> list[tuple[str, re.Pattern[str]]]:
    """The patterns of all plugins of known forms, with the kinds of secrets that they find."""
    plugins = get_mapping_from_secret_type_to_class().values()
    known = [one for one in plugins if issubclass(one, RegexBasedDetector) and one not in NO_TOKENS]
    return [(one.secret_type, pattern) for one in known for pattern in one().denylist]


def _may_be_secret(value: str) -> bool:
    """Whether an assigned value is neither very short nor a placeholder."""
    return len(value) >= FEWEST and not (
        heuristic.is_templated_secret(value)
        or heuristic.is_prefixed_with_dollar_sign(value)
        or heuristic.is_not_alphanumeric_string(value)
    )


def _replaced(text: str, secrets: set[str], kinds: dict[str, str]) -> str:
    for secret in sorted(secrets, key=lambda one: (-len(one), one)):
        text = text.replace(secret, f"[REDACTED {kinds.get(secret, KeywordDetector.secret_type)}]")
    return text
