"""The losses that a picture shows: names of one kind, with their dialects."""

from collections.abc import Sequence
from typing import Any

from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice, choose, find
from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import GRADIENTS, KINDS, REQUIRED, Dialect, Kind, Loss
from composer_plugins.plotting.data import joined
from composer_plugins.testing.inputs import UNIFORM
from composer_plugins.testing.settings import sample


def choices(names: Sequence[str], kind: str | None = None) -> list[Choice]:
    """Each named loss with values for the parameters that have no default; ConfigError for several kinds.

    A loss that is named alone, without a dialect, comes with all its dialects.
    """
    if not names:
        raise ConfigError("plot", "no loss is named", "composer-plugins list shows all")
    found = {name: find(registry(), name, kind) for name in names}
    kinds = {name: {loss.kind for loss, _ in rows} for name, rows in found.items()}
    common = _common_kind(kinds)
    chosen: list[Choice] = []
    for rows in found.values():
        (loss, only), *_ = [(loss, dialect) for loss, dialect in rows if loss.kind == common]
        wanted = [None, *loss.dialects] if len(names) == 1 and only is None else [only]
        chosen += [_choice(loss, dialect) for dialect in wanted]
    return chosen


def _common_kind(kinds: dict[str, set[Kind]]) -> Kind:
    common = set.intersection(*kinds.values())
    if len(common) == 1:
        return common.pop()
    if common:
        named, several = ", ".join(map(repr, kinds)), " or ".join(sorted(common))
        raise ConfigError("plot", f"{named} is of several kinds", f"set --kind {several}")
    each = [f"{name!r} is {' or '.join(KINDS[k].singular for k in sorted(of))}" for name, of in kinds.items()]
    raise ConfigError("plot", f"{', '.join(each)}: their axes differ", "draw one kind at a time")


def _choice(loss: Loss, dialect: Dialect | None) -> Choice:
    params = filled(loss, dialect)
    if ":" in loss.name:
        return Choice(loss, params, "plot", optional=loss.optional)
    name = f"{loss.name}@{dialect.upstream}" if dialect else loss.name
    return choose(loss.kind, name, params, option="plot").with_optional(UNIFORM)


def filled(loss: Loss, dialect: Dialect | None) -> dict[str, Any]:
    """An example value for each parameter that has neither a default nor a value of the dialect."""
    given = {*dialect.params, *dialect.denominators} if dialect else set()
    required = [name for name, default in loss.defaults.items() if default is REQUIRED]
    return {name: sample(loss.parameters[name]) for name in required if name not in given}


def notes_on(chosen: Sequence[Choice]) -> list[str]:
    """Example values of parameters without a default, and gradients that are not the value's derivative."""
    notes = []
    for choice in chosen:
        if values := filled(choice.loss, choice.dialect):
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            notes.append(f"{choice.name} has no default for {', '.join(values)}: drawn with {shown}.")
    for gradient, meaning in GRADIENTS.items():
        if meaning and (named := [one.name for one in chosen if one.loss.gradient == gradient]):
            notes.append(f"Gradient of {joined(named)}: {meaning}.")
    return notes
