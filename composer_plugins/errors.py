"""The two errors that a user can cause, and the search for the name that a user meant."""

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

MAX_LISTED = 20  # up to this many known names are listed; of more, only the nearest
MAX_NEAREST = 8
ALIKE = 0.8  # of the letters of two names, more than which a misspelt one shares: `dpo` is no misspelt `dro`
MAX_COMPLETIONS = 4  # of the names that begin with what was typed


class ComposerError(Exception):
    """An error with three parts: the key that is wrong, the problem, and the remedy.

    `str(error)` is "key: problem; remedy", and a line like it for each error that was found at the same time.
    The command line prints it without a traceback.
    """

    others: "tuple[ComposerError, ...]" = ()  # what else was found at the same time, for a doctor

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")  # what tyro, as of torchtitan, prints of an error
        self.key, self.problem, self.remedy = key, problem, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """What makes it picklable: Ray sends errors to other processes."""
        return type(self), (self.key, self.problem, self.remedy), {"others": self.others}

    def __str__(self) -> str:
        return "\n".join(one.args[0] for one in (self, *self.others))

    def under(self, prefix: str, separator: str = ".") -> Self:
        """The error with its key below `prefix`, if any: "policy" becomes "algorithm.composer.policy"."""
        if not prefix:
            return self
        error = type(self)(f"{prefix}{separator}{self.key}", self.problem, self.remedy)
        error.others = tuple(one.under(prefix, separator) for one in self.others)
        return error


class ConfigError(ComposerError, ValueError):
    """A wrong option. The key is the option as the user writes it."""


class DataError(ComposerError, ValueError):
    """Wrong data. The key says where: a column, an input of a loss, a file."""


@contextmanager
def writing(key: str, path: object) -> Iterator[None]:
    """Raise ConfigError at `key` where the system does not let this program write to `path`."""
    try:
        yield
    except OSError as error:
        problem = f"{str(path)!r} cannot be written ({error.strerror or error})"
        raise ConfigError(key, problem, "name another path") from None


def unknown(
    key: str,
    name: str,
    known: Iterable[str],
    *,
    noun: str = "",
    stem: str = "",
    more: str = "",
    guess: bool = True,
    completes: bool = True,
) -> ConfigError:
    """The error for an unknown name: it offers the nearest known names, or lists the known ones.

    `noun` is what the name should have been, if not `key`. `stem` is what every known name begins with
    ("cispo@"). `more` says where the reader finds the whole list. Without `guess` it lists them always;
    without `completes` a name stands for no longer one, as an option's.
    """
    known, noun = sorted(set(known)), noun or key
    listed = _listed(name, known, stem, more)
    if not name.strip():
        return ConfigError(key, f"no {noun} is given", listed)
    problem = f"unknown {noun} {stem + name!r}"
    nearest = near(name, known, completes=completes) if guess else []
    return ConfigError(key, problem, did_you_mean(nearest, stem) if nearest else listed)


def spelling(name: str) -> str:
    """A name as it is compared: REINFORCE++-baseline is reinforce_pp_baseline, and Dr. GRPO is dr_grpo."""
    name = name.strip().lower().replace("++", "_pp").replace(". ", "_")
    return name.replace("-", "_").replace(" ", "_")


def near(name: str, known: Iterable[str], *, completes: bool = True) -> list[str]:
    """The known names that `name` may stand for: another spelling, else a completion, else a misspelt one.

    An option is not completed: one with a further word has another meaning.
    """
    wanted, keys = spelling(name), {one: spelling(one) for one in known}
    if not wanted:
        return []
    same = [one for one, key in keys.items() if key == wanted]
    completions = [one for one, key in keys.items() if key.startswith(wanted)] if completes else []
    shortest_first = sorted(completions, key=lambda one: (len(one), one))
    alike = {one: _alike(wanted, key) for one, key in keys.items()}
    most = max(alike.values(), default=0.0)
    likeliest = [one for one, number in alike.items() if number == most > ALIKE]  # of two, neither is meant
    return same or shortest_first[:MAX_COMPLETIONS] or likeliest


def _alike(one: str, other: str) -> float:
    """How much of two spellings is the same, from 0 to 1; 1 where letters are swapped.

    A name with another number of words or other digits is another name, and so is one word that begins with
    another letter (`dtype`, `type`): 0.
    """
    if sorted(one.replace("_", "")) == sorted(other.replace("_", "")):
        return 1.0
    words, others = one.split("_"), other.split("_")
    is_another = len(words) != len(others)
    is_another |= [*filter(str.isdigit, one)] != [*filter(str.isdigit, other)]
    is_another |= len(words) == 1 and one[:1] != other[:1]
    return 0.0 if is_another else _likeness(one, other)


def did_you_mean(nearest: list[str], stem: str = "") -> str:
    """A question that offers these names."""
    *others, last = [repr(stem + one) for one in nearest]
    return f"did you mean {' or '.join([', '.join(others), last] if others else [last])}?"


def in_a_line(error: BaseException, *, most: int | None = None) -> str:
    """An exception of somebody else's code, whose text may have several lines, in one line.

    With `most` only so many characters of its text are kept.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # of its own __str__
        text = ""
    cut = text if most is None or len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} ..."
    return f"{type(error).__name__}: {cut}" if cut else type(error).__name__


def with_place(error: BaseException, *, most: int | None = None) -> str:
    """`in_a_line`, with the place in the user's code."""
    return in_a_line(error, most=most) + _place(error)


def _place(error: BaseException) -> str:
    """The last line of a user's code that an exception went through: " (at my_losses.py:12)", or ""."""
    installed = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    known = tuple(f"{path}{os.sep}" for path in (os.path.dirname(__file__), *installed))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.isfile(frame.filename) and not frame.filename.startswith(known):
            near_by = os.path.relpath(frame.filename)
            return f" (at {frame.filename if near_by.startswith('..') else near_by}:{frame.lineno})"
    return ""


def _listed(name: str, known: list[str], stem: str, more: str) -> str:
    left_out = 0
    if len(known) > MAX_LISTED:
        left_out = len(known) - MAX_NEAREST
        known = sorted(sorted(known, key=lambda one: -_likeness(one, name))[:MAX_NEAREST])
    text = ", ".join(stem + one for one in known) or "none"
    text += f" and {left_out} more" if left_out else ""
    return f"known: {text}" + (f" ({more})" if more else "")


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, spelling(one), spelling(other)).ratio()
