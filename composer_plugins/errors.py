"""What can go wrong on the user's side. Each message says what came, what was wanted, what to do."""

import difflib
from collections.abc import Iterable


class ComposerError(Exception):
    """An error of this library's own; the command line prints it without a traceback."""


class ConfigError(ComposerError, ValueError):
    """An option that means nothing, or that this framework cannot deliver."""


class DataError(ComposerError, ValueError):
    """A data set that a channel cannot be fed from."""


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name nobody knows: with the nearest match, or else with all that there are."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        return ConfigError(f"unknown {what} {name!r}: did you mean {nearest[0]!r}?")
    return ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}")
