"""Where a curve jumps, or begins or ends to be constant: the ends of a clip range, from the kernel itself."""

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

Curve = Callable[[Tensor], Tensor]

SHORTEST = 3  # segments: fewer may be constant by chance
CUTS = torch.linspace(0, 1, 65, dtype=torch.float64)  # where a search looks between two points
ROUNDS = 5  # of a search, each 64 times as fine
FLAT = 1e-10  # of the largest value: rounding
STEEP = 20  # times the slope next to it: a jump
VISIBLE, BESIDE = 2e-3, 5  # of the largest value, so many points away: a smaller bend is not seen
DIGITS, BESIDE_A_MARK = 7, 1e-5  # to which a mark is known, and the distance from it, of the axis


class Ends(NamedTuple):
    """The x where a curve jumps or begins or ends to be constant, and the value it keeps to the right.

    `cap` is None where the curve is not constant to the right, is so everywhere, or stays at 0.
    """

    marks: tuple[float, ...] = ()
    cap: float | None = None


def bends(curve: Curve, x: Tensor) -> Ends:
    """The ends of a curve's constant stretches and its jumps between the first and last x."""
    y = curve(x)
    scale = max(y.abs().max().item(), 1e-12)
    steps = y.diff().abs()
    runs = _runs((steps <= FLAT * scale).tolist())
    found, last = list[float](), len(x) - 1
    for start, end in runs:
        for edge, outside, far in ((start, start - 1, start - BESIDE), (end, end + 1, end + BESIDE)):
            if 0 <= outside <= last and (y[min(max(far, 0), last)] - y[edge]).abs() > VISIBLE * scale:
                found.append(_edge(curve, x[edge], x[outside], FLAT * scale))
    slopes = steps / x.diff()
    for i in range(1, len(slopes) - 1):
        beside = max(slopes[i - 1].item(), slopes[i + 1].item())
        if slopes[i] > STEEP * beside and steps[i] > VISIBLE * scale:
            found.append(_jump(curve, x[i], x[i + 1]))
    last_run = runs[-1] if runs else (0, 0)
    stays = last_run[1] == last and last_run[0] > 0 and y[-1].abs() > VISIBLE * scale
    decimals = DIGITS - math.floor(math.log10((x[-1] - x[0]).item()))
    marks = sorted({round(one, decimals) + 0.0 for one in found})  # + 0.0: not -0.0
    return Ends(tuple(marks), y[-1].item() if stays else None)


def with_both_sides(x: Tensor, marks: Iterable[float]) -> Tensor:
    """`x`, and a point just before and just after each mark within it, so that a jump is drawn upright."""
    inside = [mark for mark in marks if x[0] < mark < x[-1]]
    beside = {mark + side * BESIDE_A_MARK * (x[-1] - x[0]).item() for mark in inside for side in (-1, 1)}
    return torch.tensor(sorted(beside | {*x.tolist()}), dtype=x.dtype)


def _runs(flat: list[bool]) -> list[tuple[int, int]]:
    """The first and last point of each run of constant segments."""
    runs, start = list[tuple[int, int]](), 0
    for constant, segments in groupby(flat):
        end = start + len([*segments])
        if constant and end - start >= SHORTEST:
            runs.append((start, end))
        start = end
    return runs


def _edge(curve: Curve, inside: Tensor, outside: Tensor, tolerance: float) -> float:
    """The border between a point of a constant run and one beyond it."""
    value = curve(inside[None])[0]
    for _ in range(ROUNDS):
        at = inside + (outside - inside) * CUTS
        differs = ~torch.isclose(curve(at), value, rtol=0, atol=tolerance)
        differs[0], differs[-1] = False, True
        first = int(differs.int().argmax())
        inside, outside = at[first - 1], at[first]
    return inside.item()


def _jump(curve: Curve, left: Tensor, right: Tensor) -> float:
    """Where the curve jumps between two points: in the part with the largest step."""
    for _ in range(ROUNDS):
        at = left + (right - left) * CUTS
        largest = int(curve(at).diff().abs().argmax())
        left, right = at[largest], at[largest + 1]
    return left.item()
