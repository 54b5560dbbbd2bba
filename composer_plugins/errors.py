"""Errors and findings for a user, and the search for the name that a user meant.

`ConfigError` and `DataError` are raised. A `Finding` is what a doctor reports, a trainer raises or warns of,
and a test sees.
"""

import difflib
import logging
import os
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Self

Severity = Literal["error", "warning", "info"]

MAX_LISTED = 20  # up to this many known names are listed; of more, only the nearest
MAX_NEAREST = 8
ALIKE = 0.8  # a misspelt name shares more than this with what was meant: `dpo` does not stand for `dro`
MAX_COMPLETIONS = 4  # of the names that begin with what was typed


class ComposerError(Exception):
    """An error with three parts: the key that is wrong, the problem, and the remedy.

    `str(error)` is "key: problem; remedy", and a line like it for each error that was found at the same time.
    The command line prints it without a traceback.
    """

    others: "tuple[ComposerError, ...]" = ()  # what else was found at the same time, for a doctor

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")  # torchtitan's tyro prints this of an error
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


class ComposerWarning(UserWarning):
    """An option or a row of data whose effect is probably not what the user intended."""


class Finding(NamedTuple):
    """One thing to look at: the key it concerns, the problem, and the remedy."""

    severity: Severity
    key: str  # as it is written in the config
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"

    @classmethod
    def from_error(cls, error: ComposerError) -> "Finding":
        """An error as a doctor reports it."""
        return cls("error", error.key, error.problem, error.remedy)

    @classmethod
    def all_from(cls, error: ComposerError) -> "list[Finding]":
        """An error and what was found at the same time, as a doctor reports them."""
        return [cls.from_error(one) for one in (error, *error.others)]

    def under(self, prefix: str) -> "Finding":
        """The finding with its key below `prefix`, if any: "policy" becomes "algorithm.composer.policy"."""
        return self._replace(key=f"{prefix}.{self.key}") if prefix else self

    def without(self, prefix: str) -> "Finding":
        """The same finding with its key from below `prefix`: the inverse of `under`."""
        return self._replace(key=self.key.removeprefix(f"{prefix}."))


class Findings(list[Finding]):
    """What several checks find, in their order: an error of one does not keep the next from running."""

    @contextmanager
    def collected(self, prefix: str = "") -> Iterator[None]:
        """Add the ConfigError that the block raises, with its key below `prefix`, in place of raising it."""
        try:
            yield
        except ConfigError as error:
            self += Finding.all_from(error.under(prefix))

    @property
    def errors(self) -> list[Finding]:
        """The findings that have to be corrected."""
        return [one for one in self if one.severity == "error"]

    def refuse(self) -> None:
        """Raise one ConfigError with all errors, if there are any; warnings stay in the list."""
        if self.errors:
            raise error_of(self.errors)


def enforce(findings: Iterable[Finding]) -> None:
    """Warn of each warning up to the first error, and raise one ConfigError with the first error of each key.

    Remarks are for the doctor only.
    """
    wrong = list[Finding]()
    for finding in findings:
        wrong += [finding] if finding.severity == "error" else []
        if finding.severity == "warning" and not wrong:
            warnings.warn(str(finding), ComposerWarning, stacklevel=3)
    if wrong:
        raise error_of(wrong)


def error_of(findings: Iterable[Finding]) -> ConfigError:
    """One error with all of these: of each key the first. The first error has the others in `others`."""
    by_key = dict[str, ConfigError]()
    for one in findings:
        by_key.setdefault(one.key, ConfigError(one.key, one.problem, one.remedy))
    first, *others = by_key.values()
    first.others = tuple(others)
    return first


def log_info(line: str) -> None:
    """Log `line` at INFO. If logging is not configured, configure it: Python would not show the line."""
    logger = logging.getLogger("composer_plugins")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    logger.info(line)


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
    without `completes` it offers no longer name that begins with this one, as for options.
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
    likeliest = [one for one, number in alike.items() if number == most > ALIKE]
    return same or shortest_first[:MAX_COMPLETIONS] or likeliest


def _alike(one: str, other: str) -> float:
    """How much of two spellings is the same, from 0 to 1; 1 if they differ in the order of letters alone.

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
    """An exception as one line; its text may have several lines if it is not ours.

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
