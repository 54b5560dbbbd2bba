"""`sections`: the laws of every way to check, for `composer-plugins check --laws` and the site's page."""

from collections.abc import Iterator
from typing import NamedTuple

from composer_plugins.frameworks.registry import conventions
from composer_plugins.testing.conventions.functional import REDUCTIONS
from composer_plugins.testing.laws import FUNCTION, LAWS, NOT_RUN, laws_for


class Listed(NamedTuple):
    """One law as a list shows it."""

    name: str
    summary: str
    cause: str  # what usually breaks it
    kinds: tuple[str, ...] = ("policy",)
    frameworks: tuple[str, ...] = ()  # the names of --as for which it is run
    finding: str = "failed"  # what it says of a loss that it does not hold


class Section(NamedTuple):
    """The laws of one way to check."""

    option: str  # "" for a loss of the catalogue or of its convention
    text: str
    laws: tuple[Listed, ...]
    not_run: tuple[tuple[str, str], ...] = ()  # laws that do not apply, with the reason


OF_A_LOSS = "These laws are run on a loss. Each is for losses of some kinds."
OF_ONE_NUMBER = (
    "These laws are run with --as on a function that returns one number for a batch. With --as torch, a "
    "function that returns one loss per token gets the laws of a loss."
)


def sections() -> Iterator[Section]:
    """Yield the laws of a loss, and the laws of `--as`."""
    laws = (Listed(law.name, law.summary, law.cause, law.kinds, finding=law.finding) for law in LAWS.values())
    yield Section("", OF_A_LOSS, tuple(laws))
    every = tuple(conventions())
    of_functions = [
        Listed(law.name, law.summary, law.cause, ("policy",), law.frameworks or every, law.finding)
        for law in laws_for(FUNCTION).values()
    ]
    reductions = Listed(*REDUCTIONS, frameworks=("torch",))
    yield Section("--as", OF_ONE_NUMBER, (*of_functions, reductions), tuple(NOT_RUN.items()))
