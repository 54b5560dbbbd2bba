"""What a picture shows, as data: panels of lines or of bars, apart from how they are drawn."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.bends import Ends

Heights = tuple[float, float]

NARROW = 0.1  # of its distance from 0: a line that varies by less hardly varies
MUCH_LARGER = 10  # times the size of the next smaller line on the same axes


@dataclass(frozen=True)
class Series:
    """One line, or one bar in each category. A line has marks where it begins or ends to be constant."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    marks: tuple[float, ...] = ()
    cap: float | None = None  # the value at which it stays, to the right of its last mark, if not 0


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...] = ()
    categories: tuple[str, ...] = ()  # of bars: what stands below each group of bars
    reference: float | None = None  # the x at which nothing has changed yet: a ratio of 1
    has_dots: bool = False  # a dot for each point and no line, against a logarithmic axis

    @property
    def beyond(self) -> tuple[str, ...]:
        """The series of so much larger a scale than the first one that it would be flat next to them."""
        if self.categories:  # a small bar has its number next to it
            return ()
        sizes = {one.label: max(map(abs, one.y)) for one in self.series}
        ordered = sorted(size for size in sizes.values() if size > 0)
        first = sizes[self.series[0].label]
        limits = [a for a, b in pairwise(ordered) if a >= first and b > MUCH_LARGER * a]
        return tuple(label for label, size in sizes.items() if limits and size > limits[0])


@dataclass(frozen=True)
class Picture:
    """All panels, by row, and what a reader must know about the example."""

    panels: tuple[Panel, ...]
    columns: int
    notes: tuple[str, ...] = ()
    title: str = ""

    @property
    def labels(self) -> list[str]:
        """What the legend names: each line or bar once."""
        return list(dict.fromkeys(series.label for panel in self.panels for series in panel.series))

    @property
    def has_caps(self) -> bool:
        """Whether a line stays at a value, which is then written next to it."""
        return any(series.cap is not None for panel in self.panels for series in panel.series)


SAME = 1e-3  # of the largest value: curves that differ by less are one line, because nobody could see two


def heights(picture: Picture) -> list[Heights]:
    """The least and the largest y of each panel, without lines of a much larger scale.

    Panels of the same labels get the same, with 0 in it; but a line that hardly varies is magnified.
    """
    shown = [[one for one in panel.series if one.label not in panel.beyond] for panel in picture.panels]
    of_each = [(min(min(s.y) for s in lines), max(max(s.y) for s in lines)) for lines in shown]
    labels = [(panel.x_label, panel.y_label) for panel in picture.panels]
    found = []
    for i, own in enumerate(of_each):
        same = [one for one, label in zip(of_each, labels, strict=True) if label == labels[i]]
        lines = not picture.panels[i].categories
        narrow = lines and any(high - low < NARROW * max(abs(low), abs(high)) for low, high in same)
        low = own[0] if narrow else min(0.0, *(low for low, _ in same))
        high = own[1] if narrow else max(0.0, *(high for _, high in same))
        room = max(1.0, NARROW * abs(low))  # above and below a line that is level
        found.append((low, high) if low < high else (low - room, high + room))
    return found


class Curves(NamedTuple):
    """What one loss gives: for each panel its points and its values."""

    choice: Choice
    lines: tuple[tuple[Tensor, Tensor], ...]
    ends: tuple[Ends, ...] = ()


def filled(panels: Sequence[Panel], curves: Sequence[Curves]) -> tuple[Panel, ...]:
    """The panels with their series; losses whose curves coincide in all panels share one."""
    groups = _coinciding(curves)
    return tuple(replace(panel, series=_series(groups, i)) for i, panel in enumerate(panels))


def _series(groups: list[list[Curves]], panel: int) -> tuple[Series, ...]:
    found = []
    for group in groups:
        x, y = group[0].lines[panel]
        if x.numel():
            ends = group[0].ends[panel] if group[0].ends else Ends()
            label = joined([each.choice.name for each in group])
            found.append(Series(label, tuple(x.tolist()), tuple(y.tolist()), *ends))
    return tuple(found)


def joined(names: Sequence[str]) -> str:
    """Several names in a legend: "grpo, @verl, @trl" where they are dialects of one loss."""
    first = names[0]
    base = first.partition("@")[0]
    short = [name.removeprefix(base) if name.startswith(f"{base}@") else name for name in names[1:]]
    return ", ".join([first, *short])


def _coinciding(curves: Sequence[Curves]) -> list[list[Curves]]:
    groups: list[list[Curves]] = []
    for one in curves:
        for group in groups:
            if _equal(group[0], one):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _equal(one: Curves, other: Curves) -> bool:
    pairs = zip(one.lines, other.lines, strict=True)
    return all(_close(p[0], q[0]) and _close(p[1], q[1]) for p, q in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.numel() == 0 or bool((a - b).abs().max() <= SAME * a.abs().max()))
