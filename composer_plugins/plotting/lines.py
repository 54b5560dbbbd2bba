"""Pictures of lines: what losses give against one number, with marks where their gradients bend."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.bends import Ends, bends, with_both_sides
from composer_plugins.plotting.data import Curves, Panel, filled

POINTS = 400  # of a line


class Axes(NamedTuple):
    """What losses are drawn against: cases, such as the sign of the advantage, with some numbers of each."""

    measures: tuple[Callable[[Choice, Tensor], Sequence[Tensor]], ...]  # of each case: its numbers at each x
    panels: tuple[Panel, ...]  # without series: the first number of each case, then the second
    gradients: tuple[int, ...]  # for each panel the one whose bends are marked on it: that of its gradient

    def measure(self, choice: Choice, x: Tensor, panel: int) -> Tensor:
        """What a panel shows at each x."""
        number, case = divmod(panel, len(self.measures))
        return self.measures[case](choice, x)[number]

    def measured(self, choice: Choice, x: Tensor) -> list[Tensor]:
        """What each panel shows at each x."""
        cases = [measure(choice, x) for measure in self.measures]
        return [number for each in zip(*cases, strict=True) for number in each]


def ends_of(choice: Choice, axes: Axes, x: Tensor) -> tuple[Ends, ...]:
    """The bends of each panel's gradient between the first and the last x; a cap on its own panel alone."""
    found = {i: bends(partial(axes.measure, choice, panel=i), x) for i in {*axes.gradients}}
    return tuple(found[g] if i == g else Ends(found[g].marks) for i, g in enumerate(axes.gradients))


def marks_of(found: Iterable[tuple[Ends, ...]]) -> list[float]:
    """The places of all bends, each once."""
    return list(dict.fromkeys(mark for ends in found for one in ends for mark in one.marks))


def drawn(
    chosen: Sequence[Choice], axes: Axes, x: Tensor, found: Sequence[tuple[Ends, ...]]
) -> tuple[Panel, ...]:
    """The panels with a line for each loss, upright where it jumps; `found` has the ends of each."""
    x = with_both_sides(x, marks_of(found))
    lines = [tuple((x, y) for y in axes.measured(one, x)) for one in chosen]
    return filled(axes.panels, [Curves(*each) for each in zip(chosen, lines, found, strict=True)])
