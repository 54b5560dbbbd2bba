"""Secrets in states: found by the plugins of detect-secrets, and replaced before anything is written.

Its plugins of known forms are on, and its plugin of quoted values that are assigned to names like `api_key`.
The entropy plugins are off, because they would destroy hashes. Where a token or a private key ends is decided
here, because some of those plugins match only its beginning. Forms that they do not know are in OWN_FORMS.

In the arguments of a call, every value below a key like `api_key` is a secret, whatever it is.

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
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.basic_auth import BasicAuthDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.ip_public import IPPublicDetector
from detect_secrets.plugins.keyword import DENYLIST, QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP, KeywordDetector
from detect_secrets.plugins.private_key import PrivateKeyDetector

from composer_plugins.recipes.trace_replay.formats.common import Acted, json_text, without_lone_surrogates

NOT_USED = (IPPublicDetector, PrivateKeyDetector, BasicAuthDetector)  # the last two find too little
REST_OF_TOKEN = re.compile(r"[\w\-.+/=]*")
PRIVATE_KEY = re.compile(
    r"(?:BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|PuTTY-User-Key-File)"
    r".*?(?:END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]*-*|\Z)",
    re.DOTALL,
)
FEWEST, SHORT = 4, 8  # characters

NAMES = "|".join((*DENYLIST, "api-key", "passphrase", "authorization"))
NAME_IN_ARGUMENTS = re.compile(rf"{NAMES}|credential|token(?!i[sz])", re.IGNORECASE)  # not `tokenizer`
NAME_IN_TEXT = rf"(?:{NAMES}|(?:access|api|auth|bearer|id|refresh|session)[_-]?token)[\w-]{{0,40}}"
# The closing quote has as many backslashes as the opening one, so that JSON inside of JSON is read too. Of a
# value that its line does not close, the rest of the line is taken.
ASSIGNED = re.compile(
    NAME_IN_TEXT + r"""\\*["'`]?\]?(?:\s*:\s*\w+(?=\s*=))?\s*(?::=?|=>|!?=+)\s*[@bru]{0,2}"""
    r"""(\\*["'`])(?P<value>.+?)(?:(?<!\\)\1|$)""",
    re.IGNORECASE,
)
PLACEHOLDER = re.compile(
    r"(?:(?:Basic|Bearer|token) )?(?:[\W_]*|\{.*\}|<.*>|\$\{.*\}|\$\(.*\)|\$[A-Z\d_]+|\$[A-Za-z_]+)"
)
OWN_FORMS = {
    # A password may have "/" and "@"; a port before a path is none, nor is "{...}".
    BasicAuthDetector.secret_type: (
        r"""://[^\s:/?#@"'`\[\]]*:(?!\d*/|\$?\{|<)([^\s"'`<>@]{1,200}(?:@[^\s"'`<>@/]{1,200})*)@"""
    ),
    "Authorization Header": r"(?i:authorization\W{1,9}(?:basic|bearer|token) +)([\w\-.+/=~]{8,})",
    "Anthropic Token": r"sk-ant-[\w-]{20,}",
    "Google API Key": r"AIza[\w-]{30,}",
    "Hugging Face Token": r"hf_[A-Za-z0-9]{20,}",
    GitHubTokenDetector.secret_type: r"github_pat_\w{20,}",
}
KNOWN_FORMS = [
    (plugin.secret_type, pattern)
    for plugin in get_mapping_from_secret_type_to_class().values()
    if issubclass(plugin, RegexBasedDetector) and plugin not in NOT_USED
    for pattern in plugin().denylist
]
FORMS = [(kind, re.compile(pattern)) for kind, pattern in OWN_FORMS.items()] + KNOWN_FORMS
Function = Callable[[str, bool], str]


def redacted(actions: Sequence[Acted]) -> tuple[list[Acted], Counter[str]]:
    """The actions without secrets, and how many different secrets of each kind were found."""
    # The actions of a log share their messages and tools: each is looked at once.
    parts = {id(part): part for acted in actions for part in (*acted.messages, acted.tools, acted.observed)}
    kinds: dict[str, str] = {}  # of every secret

    def collect(text: str, is_secret: bool) -> str:
        for line in text.splitlines():
            kinds.update(secrets_of_line(line))
        kinds.update(dict.fromkeys(PRIVATE_KEY.findall(text), PrivateKeyDetector.secret_type))
        if is_secret and not PLACEHOLDER.fullmatch(text):
            kinds.setdefault(text, KeywordDetector.secret_type)
        return text

    def replace(text: str, is_secret: bool) -> str:
        if is_secret:
            return _replaced(text, {text}, kinds)
        here = {secret for secret in everywhere if secret in text}
        text = _replaced(text, {secret for secret in here if "\n" in secret}, kinds)
        lines = text.splitlines(keepends=True)
        found = [here | {value for value, _ in secrets_of_line(line.rstrip("\r\n"))} for line in lines]
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


def _with_texts(value: Any, function: Function, name: str = "") -> Any:
    """A message, or tools, with each text as `function(text, whether all of it is a secret)` makes it."""
    if isinstance(value, list):
        return [_with_texts(one, function) for one in value]
    if isinstance(value, dict):
        return {key: _with_texts(one, function, key) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    return _arguments(value, function) if name == "arguments" else function(value, False)


def _arguments(text: str, function: Function) -> str:
    """The arguments of a call, which stay JSON. Of a key that is there twice, only the last value stays."""
    is_repeated = False

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal is_repeated
        is_repeated |= len(dict(pairs)) < len(pairs)
        return dict(pairs)

    try:
        arguments = json.loads(text, object_pairs_hook=as_dict)
        clean = _with_keys(arguments, function)
    except (ValueError, RecursionError):
        return function(text, False)
    if clean == arguments and not is_repeated:
        return text
    return without_lone_surrogates(json_text(clean))


def _with_keys(value: Any, function: Function, name: str = "", is_secret: bool = False) -> Any:
    """A JSON value with each text, each key, and each number that is a secret, as `function` makes it."""
    is_secret = is_secret or NAME_IN_ARGUMENTS.search(name) is not None
    if isinstance(value, list):
        return [_with_keys(one, function, name, is_secret) for one in value]
    if isinstance(value, dict):
        return {function(key, False): _with_keys(one, function, key, is_secret) for key, one in value.items()}
    if isinstance(value, str):
        return function(value, is_secret and value != "")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_count = name.endswith("tokens")  # max_tokens
    return function(json.dumps(value), True) if is_secret and is_number and not is_count else value


@cache
def secrets_of_line(line: str) -> list[tuple[str, str]]:
    """The secrets of a line with their kinds."""
    found = list[tuple[str, str]]()
    for kind, pattern in FORMS:
        for match in pattern.finditer(line):
            start, end = match.span(match.lastindex or 0)  # a group is the secret, or its beginning
            rest = REST_OF_TOKEN.match(line, start)
            found.append((line[start : max(end, rest.end() if rest else 0)], kind))
    for pattern, group in [*QUOTES_REQUIRED_DENYLIST_REGEX_TO_GROUP.items(), (ASSIGNED, "value")]:
        values = (match.group(group) for match in pattern.finditer(line))
        found += [(value, KeywordDetector.secret_type) for value in values if len(value) >= FEWEST]
    return [(value, kind) for value, kind in found if not PLACEHOLDER.fullmatch(value)]


def _replaced(text: str, secrets: set[str], kinds: dict[str, str]) -> str:
    for secret in sorted(secrets, key=lambda one: (-len(one), one)):
        text = text.replace(secret, f"[REDACTED {kinds.get(secret, KeywordDetector.secret_type)}]")
    return text
