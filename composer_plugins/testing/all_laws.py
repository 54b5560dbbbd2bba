"""`sections`: the laws of every way to check, for `composer-plugins check --laws` and the site's page."""

from collections.abc import Iterator
from typing import NamedTuple

from composer_plugins.frameworks.registry import conventions
from composer_plugins.testing import trainers
from composer_plugins.testing.conventions.functional import REDUCTIONS
from composer_plugins.testing.conventions.laws import NOT_RUN, ONLY_FOR, REDUCED
from composer_plugins.testing.laws import LAWS
from composer_plugins.testing.trainer_options import option_check


class Listed(NamedTuple):
    """One law as a list shows it."""

    name: str
    summary: str
    cause: str  # what usually breaks it
    kinds: tuple[str, ...] = ("policy",)
    frameworks: tuple[str, ...] = ()  # those of --as for which it is run


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
OF_TRL = "These laws are run with --trainer on a trainer of TRL."


def sections() -> Iterator[Section]:
    """Yield the laws of a loss, those of `--as` and those of `--trainer`."""
    laws = (Listed(law.name, law.summary, law.cause, law.kinds) for law in LAWS.values())
    yield Section("", OF_A_LOSS, tuple(laws))
    every = tuple(conventions())
    reduced = [
        Listed(law.name, law.summary, law.cause, frameworks=ONLY_FOR.get(law.name, every))
        for law in REDUCED.values()
    ]
    reductions = Listed(*REDUCTIONS, frameworks=("torch",))
    yield Section("--as", OF_ONE_NUMBER, (*reduced, reductions), tuple(NOT_RUN.items()))
    of_trl = trainers.LAWS | {option_check("NAME"): trainers.OF_AN_OPTION}
    run = tuple(Listed(name, *law) for name, law in of_trl.items())
    yield Section("--trainer", OF_TRL, run, tuple(trainers.NOT_RUN.items()))
