"""Lines: what a loss gives on many points at once, with marks where its gradient bends."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses import calling
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import KINDS
from composer_plugins.plotting.bends import Ends, bends, with_both_sides
from composer_plugins.plotting.data import Curves, Panel, filled
from composer_plugins.testing.settings import main_tensor

POINTS = 400  # of a line


class Axes(NamedTuple):
    """What losses are drawn against: cases, such as the sign of the advantage, with some numbers of each."""

    measures: tuple[Callable[[Choice, Tensor], Sequence[Tensor]], ...]  # of each case: its numbers at each x
    panels: tuple[Panel, ...]  # without series: the first number of each case, then the second
    gradients: tuple[int, ...]  # for each panel the line whose bends are marked on it: its gradient

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


def call(choice: Choice, inputs: dict[str, Tensor]) -> Tensor:
    """What a loss gives for these inputs; ConfigError where it needs another one."""
    if absent := [need for need in choice.loss.needs if need not in inputs]:
        problem = f"{choice.name} needs {' and '.join(absent)}, which the picture of "
        problem += f"{KINDS[choice.loss.kind].singular} does not have"
        raise ConfigError("plot", problem, f"it has {', '.join(inputs)}: draw a loss of these")
    return main_tensor(calling.call(choice, inputs))


def with_gradients(choice: Choice, inputs: dict[str, Tensor], *leaves: Tensor) -> list[Tensor]:
    """The loss of each row of `inputs`, and its gradient in each of the leaves.

    Each row is a batch of its own where the loss uses batch statistics.
    """

    def one(*row: Tensor) -> Tensor:
        batch = {name: x[None] for name, x in zip(inputs, row, strict=True)}
        return call(choice, batch)[0]

    loss: Tensor = torch.vmap(one)(*inputs.values()) if choice.loss.over_batch else call(choice, inputs)
    gradients = torch.autograd.grad(loss.sum(), leaves)
    return [found.squeeze(-1) if found.dim() > 1 else found for found in (loss.detach(), *gradients)]
