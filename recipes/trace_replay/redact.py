"""Secrets in states: found by the detectors of detect-secrets, and replaced before anything is written.

On are its detectors of known forms (tokens, keys, passwords in URLs), and its detector of quoted values that
are assigned to names like `api_key`. Unquoted values and HTTP headers are added here. The entropy
detectors are off: they would destroy hashes. A private key is replaced whole. A secret is replaced wherever
it occurs in the logs. A short secret, or one of letters alone, is replaced only in the line that it was found
in. An assigned value of fewer than 4 characters stays.

Code has the same shape: `password=password`, `token: str`, `token = tokenizer.decode(ids)`. So a value is a
secret only if it does not look like code. A shell assignment with an upper-case name, and an option that
begins with two dashes, are no code: there also a value of letters alone is a secret.
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
    "API Token": r"\b(?:github_pat_|AIza|npm_|gsk_|sk-or-v1-|sk-proj-|xai-|r8_|nvapi-"
    r"|dckr_pat_|ya29\.|sk_test_)(?=[\w-]*\d)[\w-]{16,}",
    "Private Key": r"BEGIN ENCRYPTED PRIVATE KEY",
}
KEYWORD, PRIVATE_KEY = "Secret Keyword", "Private Key"
REST_OF_TOKEN = re.compile(r"[\w\-.+/=]*")
SHORT = 8  # characters

# Values without quotes.
FEWEST = 4  # characters of an assigned value that is replaced

PASSWORDS = r"pass(?:word|wd|phrase|code)|(?<=[_-])(?:pass|pwd)"
KEYS = (
    r"(?:api|access|private|secret|auth|account|service|client|encryption|signing|master)[_-]?key"
    r"(?:[_-]?(?:id|base))?"
)
NAMES = rf"(?:{PASSWORDS}|{KEYS}|secret|token|credentials?|authorization|auth)"
SIGN = r"(?P<sign>\s*(?:=>|:=|=|:)(?![=:])\s*|\s+)"
VALUE = r"""(?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<plain>\S+))"""
ASSIGNED = re.compile(rf"(?i)(?P<word>{NAMES})\d*(?![\w-])[\"'\]]{{0,2}}{SIGN}{VALUE}")
BEFORE = re.compile(r"[\w.-]*$")  # the first part of a name
LONGEST_BEFORE = 60  # characters
# Tokens of a text, as models count them.
TEXT_TOKEN = re.compile(
    r"(?i)(?:^|[_.-])(?:pad|eos|bos|unk|mask|cls|sep|stop|start|end|eot|special|next|prev|last|first|per|max|min"
    r"|num|n|page|image)[_-]?token$"
)

HEADER = re.compile(r"(?i)\bauthorization\b[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?(?P<value>[\w\-.~+/=:]+)")
BEARER = re.compile(r"(?i)\bbearer\s+(?P<value>[\w\-.~+/=]{8,})")
LOGIN = re.compile(r"\bwandb\s+login\b[^;&|]*?\s(?P<value>(?=[\w-]*\d)\w[\w-]{7,})(?![^\s\"'`;&|)])")
NETRC = re.compile(r"\b(?:machine\s+\S+|default)\s+login\s+\S+\s+password\s+(?P<value>\S+)")
NETRC_PART = re.compile(r"(?:^|\blogin\s+\S+)\s*\bpassword\s+(?P<value>\S+)\s*$")

USER = re.compile(r"(?:\s-u|\s--user)[\s=]+[\"']?[\w.@-]+:(?P<value>[^\s\"'`]{4,})")  # curl -u name:v

LINE_NUMBER = re.compile(
    r"^\s*(?:[\w./~-]+:)?\d+\s*(?:→|\t|:|\|)\s*"
)  # before each line that a tool has read
ESCAPED_BREAK, ESCAPED_QUOTE = re.compile(r"\\+[nr]"), re.compile(r"\\+([\"'])")
END_OF_TEXT = re.compile(r"[\"'`]|\\+[nrt\"']")
END_OF_COMMAND = re.compile(r"[;&|<>]")

PLACEHOLDER = re.compile(r"\$[\w{(]|<|\{|%[(a-z]|\[|\(|\*+$|--|\.\.\.|[xX]{4,}$")
CALL = re.compile(r"[A-Za-z_][\w.]*[(\[{]")
CODE_WITHOUT_DIGITS = re.compile(r"[A-Za-z_|.\[\](){}&?<>,:=+*/]+")
NUMBER = re.compile(r"-?\d{1,3}(?:[,_]\d{3})+|-?\d+\.\d*(?:e-?\d+)?[A-Za-z%]{0,2}|-?\d{1,7}[A-Za-z%]{0,2}")
PATH = re.compile(r"(?:~|\.\.?)/|/[\w.-]*[/.]|[A-Za-z][\w+.-]*://")
SECRET_WORD = re.compile(r"(?i)pass|pwd|secret|token|key|auth|cred")
WITH_NUMBER = re.compile(
    r"(?i)(?:u?int|float|complex|bf|fp|utf|sha|md|base|oauth|http|ed|rs|hs|es|ipv|[iuf])_?\d+"
)
CONSTANTS = frozenset(("none", "null", "true", "false", "undefined", "empty", "redacted"))


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
        if (value := _parsed(text)) is None:
            return self._text(text)  # it was no JSON before either
        if (clean := self._of_arguments(value)) == value:
            return text
        return without_lone_surrogates(json_text(clean))

    def _of_arguments(self, value: Any, name: str = "") -> Any:
        """The arguments of a call without the secrets, also in the names of their fields."""
        if isinstance(value, dict):
            return {self._text(key): self._of_arguments(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [self._of_arguments(one) for one in value]
        if not isinstance(value, str):
            return value
        if name and (value, KEYWORD) in _secrets(f'"{name}": "{value}"'):
            return self._replaced(value, {value})
        return self._text(value)


def _texts(value: Any) -> Iterator[str]:
    """Each text that may hold a secret, names of fields too; the arguments of tool calls also parsed."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from _texts(one)
            if key == "arguments" and isinstance(one, str):
                yield from _texts(_parsed(one))


def _parsed(text: str) -> Any:
    """A text as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@cache
def _secrets(line: str) -> list[tuple[str, str]]:
    """The secrets of a line with their kinds. A line of a .env file is read as if its value had quotes."""
    found = list(_of_known_form(line))
    for one in _logical_lines(line):
        name, equals, value = one.strip().removeprefix("export ").partition("=")
        if equals and name.isidentifier() and name.isupper() and value[:1] not in ("", "'", '"'):
            quoted = f'{"secret" if name.endswith("TOKEN") else name} = "{value}"'
            found += [*_of_known_form(quoted), *_assigned(quoted)]
        found += [*_assigned(one), *((value, KEYWORD) for value in _unquoted(one))]
    return [(value, kind) for value, kind in found if value in line]


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


def _logical_lines(line: str) -> list[str]:
    """The lines that a line of text holds: without line number, and those of a text inside JSON apart."""
    lines = [line]
    if "\\" in line:
        lines += [ESCAPED_QUOTE.sub(r"\1", one) for one in ESCAPED_BREAK.split(line)]
    numbered = [LINE_NUMBER.sub("", one) for one in lines]
    return list(dict.fromkeys([*lines, *numbered]))


def _unquoted(line: str) -> Iterator[str]:
    """The values of a line that are secrets by the name or the command before them."""
    for match in ASSIGNED.finditer(line):
        yield from _of_assignment(line, match)
    for match in HEADER.finditer(line):
        if not _is_code(match["value"], may_be_letters=False):
            yield match["value"]
    for match in (*BEARER.finditer(line), *LOGIN.finditer(line), *USER.finditer(line)):
        if _has_digit(match["value"]) and not _is_code(match["value"], may_be_letters=False):
            yield match["value"]
    for pattern, is_sure in ((NETRC, True), (NETRC_PART, False)):
        for match in pattern.finditer(line):
            value = _cut(match["value"])
            if len(value) >= FEWEST and not _is_code(value, may_be_letters=is_sure, is_password=True):
                yield value


def _of_assignment(line: str, match: re.Match[str]) -> Iterator[str]:
    before = BEFORE.search(line[max(0, match.start() - LONGEST_BEFORE) : match.start()])
    name = (before.group() if before else "") + match["word"]
    is_option, sign = name.startswith("-"), match["sign"]
    if (not sign.strip() and not is_option) or TEXT_TOKEN.search(name):
        return
    is_shell = sign == "=" and (is_option or (name.isupper() and name.isidentifier()))
    if match["plain"] is None:
        value, is_shell = match["double"] or match["single"] or "", False
        if re.search(r"\s", value):
            return
    else:
        value = _cut(match["plain"])
        if sign == "=" or is_option:
            value = END_OF_COMMAND.split(value)[0] if not PLACEHOLDER.match(value) else value
    is_password = re.search(PASSWORDS, name, re.IGNORECASE) is not None
    if len(value) < FEWEST or _is_code(value, may_be_letters=is_shell, is_password=is_password):
        return
    if match["word"].lower() in ("auth", "token") and not is_shell and not _has_digit(value):
        return
    yield value


def _cut(value: str) -> str:
    """The value without the quote or bracket that ends the text around it."""
    return END_OF_TEXT.split(value)[0].rstrip(",;)}]")


def _is_code(value: str, *, may_be_letters: bool, is_password: bool = False) -> bool:
    """Whether a value is a placeholder, a number, a path, or an expression of code."""
    if PLACEHOLDER.match(value) or value.lower() in CONSTANTS or sum(map(str.isalnum, value)) < FEWEST:
        return True
    if NUMBER.fullmatch(value) and not (is_password and value.isdigit()):
        return True
    if PATH.match(value):
        return True
    if may_be_letters:
        return False
    if CALL.match(value) or CODE_WITHOUT_DIGITS.fullmatch(value):
        return True
    return all(map(_is_name, value.split(".")))


def _is_name(word: str) -> bool:
    """Whether a word is the name of a variable or a type: `token_2`, `int32`, `my-api-key`."""
    without = word.rstrip("0123456789")
    if _has_digit(without):
        return False
    if without == word:
        return word.replace("_", "a").isalpha() or SECRET_WORD.search(word) is not None
    return WITH_NUMBER.fullmatch(word) is not None or (
        SECRET_WORD.search(word) is not None and without.replace("_", "a").replace("-", "a").isalpha()
    )


def _has_digit(value: str) -> bool:
    return any(map(str.isdigit, value))
