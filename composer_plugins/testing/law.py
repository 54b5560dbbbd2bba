"""`Law`: one property, the subjects that must have it, and the usual cause where one does not have it.

A subject is a kernel of some kind, which returns one loss per token ("policy", "divergence" ...), or a
function that returns one number for a batch (`FUNCTION`). A law gets it as a `settings.Setting`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.losses.row import KINDS, Kind, Loss
from composer_plugins.testing.report import Finding

PER_TOKEN_LOSS: tuple[Kind, ...] = ("policy", "divergence", "kl")
PER_TOKEN: tuple[Kind, ...] = (*PER_TOKEN_LOSS, "correction")
LOSS: tuple[Kind, ...] = (*PER_TOKEN_LOSS, "preference")
EVERY: tuple[Kind, ...] = (*PER_TOKEN, "preference", "advantage")
FUNCTION = "function"

EITHER = {"entropies", "topk_logprobs"}  # inputs in which a bonus has a gradient, and a gate has none
Excuse = Callable[[Loss], str]  # the reason why a row that declares it need not have a property, or ""
Check = Callable[[Any], None]  # of a subject; raises BrokenLaw, or NotApplicable


class BrokenLaw(AssertionError):
    """The loss does not have the property; the message has the numbers.

    `cause` replaces the usual cause, and `finding` the law's finding. With `usable` the other laws can be
    tried, although this one is the first.
    """

    def __init__(
        self, problem: str, cause: str = "", usable: bool = False, finding: Finding | None = None
    ) -> None:
        super().__init__(problem)
        self.cause, self.usable, self.finding = cause, usable, finding


class NotApplicable(Exception):
    """The property means nothing for this way to call the loss; the message says why."""


class Law(NamedTuple):
    """One property of some subjects."""

    name: str
    summary: str
    kinds: tuple[str, ...]  # of kernels, or FUNCTION
    cause: str  # what usually breaks it, and what to write instead
    check: Check
    thorough: bool = True  # whether it is checked in every setting: with each parameter changed, too
    excuse: Excuse = lambda loss: ""
    frameworks: tuple[str, ...] = ()  # of a function: the names of --as for which it is run; () is all
    first: bool = False  # whether it is the one to run first, because the others rely on it
    finding: Finding = "failed"  # what it says of a loss that it does not hold
    causes: Mapping[str, str] = {}  # by kind, where another thing usually breaks it


EVERY_LAW: list[Law] = []
NOT_RUN: dict[str, str] = {}  # why a law of policy losses is not run on a function, by its name
ONE_NUMBER = "the function returns one number, and not one loss per token"
NONE: Mapping[str, Any] = {}


def law(
    *kinds: str, cause: str, own: Mapping[str, Any] = NONE, no_function: str = "", **fields: Any
) -> Callable[[Check], Check]:
    """Register a function of a subject as a law of these kinds; its first line is the summary.

    `own` has further subjects, each with the fields of `Law` that are different for it: a name, for example,
    that users have written in `exceptions` and --only. `no_function` is the reason why a law of policy losses
    is not run on a function. `fields` are further fields of `Law`.
    """

    def register(check: Check) -> Check:
        summary = (check.__doc__ or "").partition("\n")[0]
        of_kernels = tuple(kind for kind in kinds if kind in KINDS)
        base = Law(check.__name__, summary, of_kernels, cause, check, **fields)
        if of_kernels:
            EVERY_LAW.append(base)
        for kind, different in ({kind: NONE for kind in kinds if kind not in KINDS} | {**own}).items():
            EVERY_LAW.append(base._replace(kinds=(kind,), **different))
        if no_function:
            NOT_RUN[base.name] = no_function
        return check

    return register


def laws_for(kind: str, framework: str = "") -> dict[str, Law]:
    """The laws of one kind of subject by name; of a function, those that are run for this framework."""
    of_kind = [one for one in EVERY_LAW if kind in one.kinds]
    chosen = [one for one in of_kind if not framework or framework in (one.frameworks or (framework,))]
    return {one.name: one for one in sorted(chosen, key=lambda one: not one.first)}


def of_the_batch(loss: Loss) -> str:
    """The excuse of a loss with `over_batch`."""
    return "it declares a statistic of the whole batch (over_batch)" if loss.over_batch else ""


def require(holds: bool | Tensor, problem: str, **options: Any) -> None:
    """Raise BrokenLaw with this problem, and these options of its own, unless it holds."""
    if not holds:
        raise BrokenLaw(problem, **options)


def some_raised_more(
    more: Tensor, less: Tensor, first: str, second: str, *, never_lowered: bool = False
) -> bool:
    """Whether descent raises a token more with `first` than with `second`; BrokenLaw if it raises one less.

    `more` and `less` [rows] or [rows, tokens] say how far descent raises the same tokens with each of them.
    With `never_lowered` it must lower no token with `first`.
    """
    more, less = more.reshape(len(more), -1), less.reshape(len(less), -1)
    gap = more - (less.clamp(min=0) if never_lowered else less)
    wrong, worst = ~(gap >= 0).all(1), int(gap.amin(1).argmin())
    count = f"{int(wrong.sum())} of {len(wrong)} rows too little with {first}"
    found = f"one of them by {numbers(more[worst])}, and with {second} by {numbers(less[worst])}"
    require(not wrong.any(), f"gradient descent raises {count}: {found}")
    return bool((more > less).any())


def numbers(x: Tensor) -> str:
    """The first numbers of a tensor, or its only one, for a message."""
    x = x.detach()
    if not x.dim():
        return f"{float(x):.6g}"
    flat = x.flatten()
    shown = ", ".join(f"{value:.6g}" for value in flat[:8].tolist())
    return f"[{shown}{', ...' if flat.numel() > 8 else ''}]"


def numbers_of(gradients: Mapping[str, Tensor]) -> str:
    """The first numbers of each gradient, for a message."""
    return " and ".join(f"{name} is {numbers(x)}" for name, x in gradients.items())


def require_equal(ours: Tensor, wanted: Tensor, problem: str) -> None:
    """Raise BrokenLaw unless two tensors are equal bit for bit, where NaN equals NaN."""
    same = ours.shape == wanted.shape and torch.equal(ours.nan_to_num(nan=0.5), wanted.nan_to_num(nan=0.5))
    require(same, f"{problem}: {numbers(ours)}, and not {numbers(wanted)}")


def require_close(ours: Tensor, wanted: Tensor, allowed: float, what: str) -> None:
    """Require equality within `allowed`; NaN equals NaN. The message has the first number that differs."""
    if ours.shape != wanted.shape:
        raise BrokenLaw(f"{what} has the shape {[*ours.shape]}, and not {[*wanted.shape]}")
    ours, wanted = ours.double(), wanted.double()
    wrong = ~((ours - wanted).abs() <= allowed) & ~(ours.isnan() & wanted.isnan()) & (ours != wanted)
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    axes = zip(("row", "token", "entry"), first, strict=False)
    where = " at " * bool(first) + ", ".join(f"{axis} {place}" for axis, place in axes)
    count = f" ({int(wrong.sum())} of {wrong.numel()} numbers differ)" if first else ""
    found, one = float(ours[first]) + 0.0, float(wanted[first]) + 0.0  # 0, and not -0
    raise BrokenLaw(f"{what}{where} is {found:.6g}, and not {one:.6g}{count}")
