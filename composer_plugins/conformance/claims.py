"""A parity claim: one of our losses is one loss of an upstream, in value and gradient, on any drawn case."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.losses.row import Kind
from composer_plugins.testing.assertions import largest_number, tolerance
from composer_plugins.testing.draws import Draw

VALUE, GRADIENT = "value", "gradient"


class Error(NamedTuple):
    """How far apart two numbers are and may be, relative to a scale."""

    found: float
    allowed: float


class Compared(NamedTuple):
    """Our tensor and an upstream's; `terms`, `magnitude` and `dtype` as `assert_parity` takes them.

    An error is given relative to `scale`: by default to `magnitude`, which may also be a bound far above
    the terms.
    """

    ours: Tensor
    theirs: Tensor
    terms: int
    magnitude: float | None = None
    dtype: torch.dtype = torch.float64
    what: str = VALUE  # VALUE, GRADIENT, or the name of a metric
    scale: float | None = None

    @property
    def error(self) -> Error:
        """The largest difference, and the largest that rounding explains."""
        ours, theirs = self.ours.detach().double(), self.theirs.detach().double()
        if ours.shape != theirs.shape:
            return Error(torch.inf, 0.0)
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        difference = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        largest = float(difference.max()) if difference.numel() else 0.0
        magnitude = largest_number(theirs) if self.magnitude is None else self.magnitude
        allowed = tolerance(self.dtype, self.terms, magnitude)
        scale = (magnitude if self.scale is None else self.scale) or 1.0
        return Error(largest / scale, allowed / scale)


class Place(NamedTuple):
    """Where an upstream has a loss: a file of its package or a registry, and the options that choose it."""

    where: str
    options: Mapping[str, str] = {}


@dataclass(frozen=True)
class Claim:
    """One row of the table: `compare` draws a case and compares it."""

    kind: Kind
    ours: str  # as the catalogue names it: "cispo@trl"
    theirs: str  # as the upstream's users know it: "GRPOTrainer cispo"
    place: Place
    compare: Callable[[Draw], Iterable[Compared]] = field(compare=False)
    note: str = ""

    def __str__(self) -> str:
        return f"{self.ours}-{self.theirs}"


class Absent(NamedTuple):
    """A loss of an upstream that is not compared, and the reason; `missing`: because we have no such loss."""

    theirs: str
    reason: str
    missing: bool


def with_gradients(
    ours: Tensor,
    theirs: Tensor,
    leaf: Tensor,
    *,
    terms: int,
    magnitude: float | None = None,
    scale: float | None = None,
) -> list[Compared]:
    """Two losses and their gradients in `leaf`."""
    mine, want = (torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (ours, theirs))
    return [
        Compared(ours, theirs, terms, magnitude, scale=scale),
        Compared(mine, want, terms, magnitude, what=GRADIENT, scale=scale),
    ]
