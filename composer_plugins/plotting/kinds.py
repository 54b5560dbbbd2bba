"""Which picture each kind of loss has."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from composer_plugins.errors import ComposerError, ConfigError, in_a_line
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import KINDS, Kind
from composer_plugins.plotting import bars, divergence, policy, preference, ratios
from composer_plugins.plotting.data import Panel, Picture
from composer_plugins.plotting.named import notes_on

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
