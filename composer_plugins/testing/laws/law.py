"""`Law`: one property that a loss must have, with the usual cause where a loss does not have it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.losses.row import Kind, Loss
from composer_plugins.testing.settings import Setting, settings

PER_TOKEN_LOSS: tuple[Kind, ...] = ("policy", "divergence", "kl")
PER_TOKEN: tuple[Kind, ...] = (*PER_TOKEN_LOSS, "correction")
LOSS: tuple[Kind, ...] = (*PER_TOKEN_LOSS, "preference")
EVERY: tuple[Kind, ...] = (*PER_TOKEN, "preference", "advantage")


EITHER = {"entropies", "topk_logprobs"}  # inputs in which a bonus has a gradient, and a gate has none


class BrokenLaw(AssertionError):
    """The loss does not have the property; the message has the numbers."""


class NotApplicable(Exception):
    """The property means nothing for this way to call the loss; the message says why."""


class Law(NamedTuple):
    """One property of the losses of some kinds."""

    name: str
    summary: str
    kinds: tuple[Kind, ...]
    cause: str  # what usually breaks it, and what to write instead
    check: Callable[[Setting], None]  # raises BrokenLaw, or NotApplicable
    thorough: bool  # whether it is checked in every setting: with each parameter changed, too
    excuse: Callable[[Loss], str]  # the reason why a row that declares it need not have the property, or ""


LAWS: dict[str, Law] = {}


def law(
    *kinds: Kind, cause: str, thorough: bool = True, excuse: Callable[[Loss], str] = lambda loss: ""
) -> Callable[[Callable[[Setting], None]], Callable[[Setting], None]]:
    """Register a function of a `Setting` as a law of these kinds; its first line is the summary."""

    def register(check: Callable[[Setting], None]) -> Callable[[Setting], None]:
        summary = (check.__doc__ or "").partition("\n")[0]
        LAWS[check.__name__] = Law(check.__name__, summary, kinds, cause, check, thorough, excuse)
        return check

    return register


def require_one_without(setting: Setting, property_: Callable[[Setting], None], problem: str) -> None:
    """Require that a row lacks a property, which it declares to lack, in one of its settings."""
    if setting.label != setting.loss.name:
        raise NotApplicable("one of its settings is enough")
    for one in settings(setting.loss):
        try:
            property_(one)
        except AssertionError:
            return
    require(False, problem)


def of_the_batch(loss: Loss) -> str:
    """The excuse of a loss with `over_batch`."""
    return "it declares a statistic of the whole batch (over_batch)" if loss.over_batch else ""


def require(holds: bool | Tensor, problem: str) -> None:
    """Raise BrokenLaw with this problem unless it holds."""
    if not holds:
        raise BrokenLaw(problem)


def require_first_of_pair_raised(gradient: Tensor, first: str, second: str, *, never_lowered: bool) -> None:
    """Require that descent raises the first row of each pair no less than the second, and of some pair more.

    `gradient` [rows] or [rows, tokens] is that of rows which are equal in pairs, but for what `first` and
    `second` say. With `never_lowered`, descent lowers no token of a first row.
    """
    raised = -gradient.reshape(len(gradient), -1)
    more, less = raised[::2], raised[1::2]
    gap = more - (less.clamp(min=0) if never_lowered else less)
    holds = (gap >= 0).all() and bool((more > less).any())  # a loss may leave out rows
    worst = int(gap.amin(1).argmin())
    found = f"a row with {first} by {numbers(more[worst])}, and with {second} by {numbers(less[worst])}"
    require(holds, f"gradient descent raises {found}")


def numbers(x: Tensor) -> str:
    """The first numbers of a tensor, for a message."""
    flat = x.detach().flatten()
    shown = ", ".join(f"{value:.6g}" for value in flat[:8].tolist())
    return f"[{shown}{', ...' if flat.numel() > 8 else ''}]"


def numbers_of(gradients: dict[str, Tensor]) -> str:
    """The first numbers of each gradient, for a message."""
    return " and ".join(f"the gradient of {name!r} is {numbers(x)}" for name, x in gradients.items())


def require_equal(ours: Tensor, wanted: Tensor, problem: str) -> None:
    """Raise BrokenLaw unless two tensors are equal bit for bit, where NaN equals NaN."""
    same = ours.shape == wanted.shape and torch.equal(ours.nan_to_num(nan=0.5), wanted.nan_to_num(nan=0.5))
    require(same, f"{problem}: {numbers(ours)}, and not {numbers(wanted)}")
