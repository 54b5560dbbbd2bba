"""Secrets in states: found by the detectors of detect-secrets, and replaced before anything is written.

On are its detectors of known forms (tokens, keys, passwords in URLs), and its detector of values that are
assigned to names like `api_key`. Its entropy detectors are off: they would destroy hashes. A private key is
replaced whole. A secret is replaced wherever it occurs in the logs, but one that is short, or a word of
letters, only in the line that it was found in. An assigned value of fewer than 4 characters stays.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
from detect_secrets.filters import heuristic
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.keyword import KeywordDetector

from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    json_text,
    mapped,
    without_lone_surrogates,
)

NOT_SECRET = "Public IP (ipv4)"
# Forms that detect-secrets 1.5 does not know.
MORE = {
    "Anthropic API Key": r"sk-ant-[\w-]{16,}",
    "Hugging Face Token": r"\bhf_[A-Za-z0-9]{30,}",
    "Private Key": r"BEGIN ENCRYPTED PRIVATE KEY",
}
KEYWORD, PRIVATE_KEY = "Secret Keyword", "Private Key"
FEWEST = 4  # characters of an assigned value that is replaced
REST_OF_TOKEN = re.compile(r"[\w\-.+/=]*")
SHORT = 8  # characters


def redacted(actions: Sequence[Acted]) -> tuple[list[Acted], Counter[str]]:
    """The actions without secrets, and how many different secrets of each kind were found."""
    # The actions of a log share their messages and tools: each is looked at once.
    parts = {id(part): part for acted in actions for part in (*acted.messages, acted.tools, acted.observed)}
    redactor = Redactor(dict.fromkeys(_texts(list(parts.values()))))
    clean = {name: redactor.of(part) for name, part in parts.items()}
    found = [
        acted._replace(
            messages=[clean[id(message)] for message in acted.messages],
            tools=clean[id(acted.tools)],
            observed=clean[id(acted.observed)],
        )
        for acted in actions
    ]
    return found, redactor.counts()


class Redactor:
    """Finds the secrets of all texts first, and then replaces them in any value."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._kinds: dict[str, str] = {}  # of every secret
        self._done: dict[str, str] = {}
        for text in texts:
            for line in text.splitlines():
                for value, kind in _secrets(line):
                    for secret in _private_keys(text, value) if kind == PRIVATE_KEY else (value,):
                        self._kinds.setdefault(secret, kind)
        self._everywhere = {one for one in self._kinds if len(one) >= SHORT and not one.isalpha()}

    def of(self, value: Any) -> Any:
        """A JSON value without the secrets; the arguments of tool calls stay JSON."""
        if isinstance(value, dict) and isinstance(value.get("arguments"), str) and "name" in value:
            return {**mapped(value, self._text), "arguments": self._arguments(value["arguments"])}
        if isinstance(value, dict):
            return {key: self.of(one) for key, one in value.items()}
        return [self.of(one) for one in value] if isinstance(value, list) else mapped(value, self._text)

    def counts(self) -> Counter[str]:
        """The number of different secrets of each kind."""
        return Counter(self._kinds.values())

    def _text(self, text: str) -> str:
        if text not in self._done:
            everywhere = {one for one in self._everywhere if one in text}
            blocks = {one for one in everywhere if "\n" in one}
            lines = self._replaced(text, blocks).splitlines(keepends=True)
            own = [everywhere | {value for value, _ in _secrets(line.rstrip("\r\n"))} for line in lines]
            done = "".join(self._replaced(*one) for one in zip(lines, own, strict=True))
            self._done[text] = done
        return self._done[text]

    def _replaced(self, text: str, secrets: set[str]) -> str:
        for secret in sorted(secrets, key=lambda one: (-len(one), one)):
            text = text.replace(secret, f"[REDACTED {self._kinds.get(secret, PRIVATE_KEY)}]")
        return text

    def _arguments(self, text: str) -> str:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self._text(text)  # it was no JSON before either
        if (clean := _mapped_with_names(value, self._text)) == value:
            return text
        return without_lone_surrogates(json_text(clean))


def _texts(value: Any) -> Iterator[str]:
    """Each text that may hold a secret: all strings, and the arguments of tool calls also parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _texts(one)
            if key == "arguments" and isinstance(one, str):
                yield from _parsed_texts(one)


def _parsed_texts(text: str) -> Iterator[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    yield from _strings(value)


def _strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, the names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _strings(one)


def _mapped_with_names(value: Any, function: Any) -> Any:
    """A JSON value with `function` applied to each string, the names of fields among them."""
    if isinstance(value, dict):
        return {function(key): _mapped_with_names(one, function) for key, one in value.items()}
    if isinstance(value, list):
        return [_mapped_with_names(one, function) for one in value]
    return function(value) if isinstance(value, str) else value


@cache
def _secrets(line: str) -> list[tuple[str, str]]:
    """The secrets of a line with their kinds. A line of a .env file is read as if its value had quotes."""
    found = list(_of_known_form(line))
    name, equals, value = line.strip().removeprefix("export ").partition("=")
    if equals and name.isidentifier() and name.isupper() and value[:1] not in ("", "'", '"'):
        quoted = f'{"secret" if name.endswith("TOKEN") else name} = "{value}"'
        found += [*_of_known_form(quoted), *_assigned(quoted)]
    return [*found, *_assigned(line)]


def _of_known_form(line: str) -> Iterator[tuple[str, str]]:
    for kind, pattern in _forms():
        for match in pattern.finditer(line):
            # A group is the secret without its surroundings, or the first part of a token.
            secret = (match.group(1) if match.re.groups else None) or match.group().strip(" \t\"'=:")
            start = line.index(secret, match.start())
            end = start + len(secret)
            rest = REST_OF_TOKEN.match(line, end)
            yield line[start : rest.end() if rest and kind != PRIVATE_KEY else end], kind


@cache
def _forms() -> list[tuple[str, re.Pattern[str]]]:
    """The patterns of all detectors of known forms, with the kinds that they find."""
    detectors = get_mapping_from_secret_type_to_class().values()
    patterns = [
        (detector.secret_type, pattern)
        for detector in detectors
        if issubclass(detector, RegexBasedDetector) and detector.secret_type != NOT_SECRET
        for pattern in detector().denylist
    ]
    return [*patterns, *((kind, re.compile(pattern)) for kind, pattern in MORE.items())]


def _assigned(line: str) -> Iterator[tuple[str, str]]:
    """Values in quotes that are assigned to names like `api_key`."""
    detector = KeywordDetector()
    while values := {one for one in detector.analyze_string(line) if one in line}:
        for value in values:
            line = line.replace(value, "[]")  # it finds only the first of a line
            if len(value) >= FEWEST and not (
                heuristic.is_templated_secret(value)
                or heuristic.is_prefixed_with_dollar_sign(value)
                or heuristic.is_not_alphanumeric_string(value)
            ):
                yield value, KEYWORD


def _private_keys(text: str, header: str) -> Iterator[str]:
    """Each private key with this header, up to its last line, or to the end of the text."""
    footer, start = header.replace("BEGIN ", "END "), text.find(header)
    while start >= 0:
        end = text.find(footer, start + len(header))
        end = len(text) if end < 0 else end + len(footer)
        yield text[start:end]
        start = text.find(header, end)
