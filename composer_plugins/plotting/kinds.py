"""The picture of losses that a user named: the losses of one kind, by the picture that the kind has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from composer_plugins.errors import ComposerError, ConfigError, in_a_line
from composer_plugins.losses.choosing import Choice, find, kind_meant, of_row
from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import GRADIENTS, KINDS, REQUIRED, Kind
from composer_plugins.plotting import bars, divergence, policy, preference, ratios
from composer_plugins.plotting.data import Panel, Picture, joined
from composer_plugins.testing.inputs import UNIFORM
from composer_plugins.testing.settings import sample

PICTURES: dict[Kind, Callable[[Sequence[Choice]], Picture]] = {
    "policy": policy.picture,
    "advantage": bars.advantage_picture,
    "divergence": divergence.picture,
    "preference": preference.picture,
    "kl": ratios.kl_picture,
    "correction": ratios.correction_picture,
    "aggregation": bars.aggregation_picture,
}

LARGEST = 1e100  # beyond it, the length of an axis may overflow


def picture_of(chosen: Sequence[Choice]) -> Picture:
    """The picture of losses of one kind."""
    kind = chosen[0].loss.kind
    try:
        drawn = PICTURES[kind](chosen)
    except ComposerError:
        raise
    except (Exception, SystemExit) as error:  # a plugin's own kernel, or a user's function
        named = ", ".join(one.name for one in chosen)
        problem = f"{named}: a kernel fails on the example: {in_a_line(error)}"
        raise ConfigError("plot", problem, f"run composer-plugins check {chosen[0].loss.name}") from error
    for panel in drawn.panels:
        _check_finite(panel)
    words = KINDS[kind]
    names = list(dict.fromkeys(one.loss.name for one in chosen))
    notes = [*drawn.notes, *notes_on(chosen)]
    if drawn.has_caps:
        notes.append("Numbers with an arrow: the value at which a line stays in the end.")
    if beyond := list(dict.fromkeys(label for panel in drawn.panels for label in panel.beyond)):
        notes.append(f"{'; '.join(beyond)}: of a much larger scale, and cut at the edge of some panels.")
    title = f"{', '.join(names)}: {words.singular if len(names) == 1 else words.plural}"
    return replace(drawn, title=title, notes=tuple(notes))


def _check_finite(panel: Panel) -> None:
    """Raise ConfigError for a number that no axis can show: NaN, an infinity, or one beyond `LARGEST`."""
    for series in panel.series:
        wrong = [(x, y) for x, y in zip(series.x, series.y, strict=True) if not abs(y) <= LARGEST]
        if wrong:
            x, y = wrong[0]
            at = panel.categories[int(x)] if panel.categories else f"{x:g}"
            problem = f"{series.label}: {panel.y_label!r} is {y:g} where {panel.x_label!r} is {at}"
            problem += (
                f" (panel {panel.title!r}), and cannot be drawn at {len(wrong)} of {len(series.x)} points"
            )
            raise ConfigError("plot", problem, "correct the loss there, or leave it out of the picture")


def choices(names: Sequence[str], kind: str | None = None) -> list[Choice]:
    """Each named loss with values for the parameters that have no default; ConfigError without a common kind.

    A loss that is named alone, without a dialect, comes with all its dialects.
    """
    found = {name: find(registry(), name, kind) for name in names}
    common = _common_kind({name: {one.loss.kind for one in rows} for name, rows in found.items()})
    chosen: list[Choice] = []
    for rows in found.values():
        first = next(one for one in rows if one.loss.kind == common)
        is_alone = len(names) == 1 and first.dialect is None
        others = [of_row(first.loss, first.option, dialect) for dialect in first.loss.dialects if is_alone]
        chosen += [first, *others]
    drawn = [replace(one, params={**filled(one), **one.params}, option="plot") for one in chosen]
    return [one.with_optional(UNIFORM) for one in drawn]


def _common_kind(kinds: dict[str, set[Kind]]) -> Kind:
    common = set.intersection(*kinds.values())
    if common:
        return kind_meant(common, ", ".join(kinds))
    each = [f"{name!r} is {' or '.join(KINDS[k].singular for k in sorted(of))}" for name, of in kinds.items()]
    raise ConfigError("plot", f"{', '.join(each)}: their axes differ", "draw one kind at a time")


def filled(choice: Choice) -> dict[str, Any]:
    """An example value for each parameter that has neither a default nor a value of the dialect."""
    given = {*choice.dialect.params, *choice.dialect.denominators} if choice.dialect else set()
    required = [name for name, default in choice.loss.defaults.items() if default is REQUIRED]
    return {name: sample(choice.loss.parameters[name]) for name in required if name not in given}


def notes_on(chosen: Sequence[Choice]) -> list[str]:
    """Example values of parameters without a default, and gradients that are not the value's derivative."""
    notes = []
    for choice in chosen:
        if values := filled(choice):
            shown = ", ".join(f"{name}={value}" for name, value in values.items())
            notes.append(f"{choice.name} has no default for {', '.join(values)}: drawn with {shown}.")
    for gradient, meaning in GRADIENTS.items():
        if meaning and (named := [one.name for one in chosen if one.loss.gradient == gradient]):
            notes.append(f"Gradient of {joined(named)}: {meaning}.")
    return notes
