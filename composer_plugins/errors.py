"""What can go wrong on the user's side. Each message says what came, what was wanted, what to do."""

import difflib
from collections.abc import Iterable

LISTED_WHOLE = 20  # so many known names are listed as they are; of more, the nearest
NEAREST = 8
BEGUN = 4  # so many names that begin with what was typed are offered


class ComposerError(Exception):
    """An error of this library's own; the command line prints it without a traceback."""


class ConfigError(ComposerError, ValueError):
    """An option that means nothing, or that this framework cannot deliver."""


class DataError(ComposerError, ValueError):
    """A data set that a channel cannot be fed from."""


def unknown(what: str, name: str, known: Iterable[str], *, stem: str = "", more: str = "") -> ConfigError:
    """The error for a name nobody knows: with those it may stand for, or else with what there is.

    `stem` is what every known name begins with and the comparison leaves out ("cispo@"); `more` says
    where a reader finds them all.
    """
    known = sorted(set(known))
    if not name.strip():
        return ConfigError(f"{what}: no name given{_listed(name, known, stem, more)}")
    if nearest := near(name, known):
        return ConfigError(f"unknown {what} {stem + name!r}{did_you_mean(nearest, stem)}")
    return ConfigError(f"unknown {what} {stem + name!r}{_listed(name, known, stem, more)}")


def spelling(name: str) -> str:
    """A name as it is compared: REINFORCE++-baseline is reinforce_pp_baseline."""
    return name.strip().lower().replace("++", "_pp").replace("-", "_").replace(" ", "_")


def near(name: str, known: Iterable[str]) -> list[str]:
    """What `name` may stand for: the same written otherwise, else what begins so, else the most alike."""
    wanted, keys = spelling(name), {one: spelling(one) for one in known}
    if not wanted:
        return []
    same = [one for one, key in keys.items() if key == wanted]
    begun = [one for one, key in keys.items() if key.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, keys.values(), n=1)
    shortest_first = sorted(begun, key=lambda one: (len(one), one))
    return same or shortest_first[:BEGUN] or [one for one, key in keys.items() if key in alike][:1]


def did_you_mean(nearest: list[str], stem: str = "") -> str:
    """The end of a sentence that offers these names."""
    *others, last = [repr(stem + one) for one in nearest]
    return f": did you mean {' or '.join([', '.join(others), last] if others else [last])}?"


def in_a_line(error: BaseException) -> str:
    """An exception of somebody else's code, whose text may have several lines."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _listed(name: str, known: list[str], stem: str, more: str) -> str:
    left_out = 0
    if len(known) > LISTED_WHOLE:
        left_out = len(known) - NEAREST
        known = sorted(known, key=lambda one: -_likeness(one, name))[:NEAREST]
    text = ", ".join(stem + one for one in known) or "none"
    text += f" and {left_out} more" if left_out else ""
    return f"; known: {text}" + (f" ({more})" if more else "")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, spelling(one), spelling(other)).ratio()
