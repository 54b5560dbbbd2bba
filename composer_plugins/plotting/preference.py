"""Preference losses: value and gradients against the margin of a pair, or the log ratio of one response."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.bends import Ends, bends, with_both_sides
from composer_plugins.plotting.calls import one_by_one
from composer_plugins.plotting.data import Curves, Panel, Picture, with_series

POINTS = 400
REACH = 5.0  # the margin times beta at the ends of the axis: a sigmoid is then flat
WIDEST_AVERAGE = 4.0  # nats per token
NLL = 1.0  # nats per token, where a loss has one beside its margin

Measure = Callable[[Choice, Tensor], list[Tensor]]  # at each x: what each panel shows


class Axes(NamedTuple):
    """What losses that take the same inputs are drawn against."""

    takes: str  # for the error about losses that do not fit on one picture
    measure: Measure
    x_label: str
    panels: tuple[tuple[str, str], ...]  # title and label of y
    columns: int


def picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradients of each loss; all must take the same things: pairs, or responses of their own."""
    kinds = {one.name: _axes(one) for one in chosen}
    if len(set(kinds.values())) > 1:
        first = {axes: name for name, axes in reversed(kinds.items())}
        each = ", ".join(f"{name!r} takes {axes.takes}" for axes, name in reversed(first.items()))
        raise ConfigError("plot", f"their axes differ: {each}", "draw them apart")
    axes = kinds[chosen[0].name]
    reach = max(_reach(one) for one in chosen)
    low = 0.0 if axes is NLLS else -reach
    x = torch.linspace(low, reach, POINTS + 1, dtype=torch.float64)
    ends = [_ends(one, axes, x) for one in chosen]
    x = with_both_sides(x, [mark for row in ends for one in row for mark in one.marks])
    curves = [
        Curves(one, tuple((x, y) for y in axes.measure(one, x)), row)
        for one, row in zip(chosen, ends, strict=True)
    ]
    reference = None if axes is NLLS else 0.0
    blank = [Panel(title, axes.x_label, y, reference=reference) for title, y in axes.panels]
    panels = tuple(with_series(panel, curves, i) for i, panel in enumerate(blank))
    return Picture("", panels, axes.columns, tuple(_notes(chosen, axes)))


def _ends(choice: Choice, axes: Axes, x: Tensor) -> tuple[Ends, ...]:
    """The bends of each gradient; those of the loss itself are at the same places."""
    return tuple(
        Ends() if y.startswith("loss") else bends(partial(_nth, axes.measure, choice, i), x)
        for i, (_, y) in enumerate(axes.panels)
    )


def _nth(measure: Measure, choice: Choice, i: int, x: Tensor) -> Tensor:
    return measure(choice, x)[i]


def of_pairs(choice: Choice, margin: Tensor) -> list[Tensor]:
    """Loss and both gradients at each margin: the chosen score goes up by half of it, the rejected down."""
    reach = max(_reach(choice), margin.abs().max().item())
    start = torch.full_like(margin, -reach / 2 - (0.05 if choice.average else 1))
    chosen, rejected = (start + margin / 2).requires_grad_(), (start - margin / 2).requires_grad_()
    nll = torch.full_like(margin, NLL)
    inputs = {"chosen": chosen, "rejected": rejected, "ref_chosen": start, "ref_rejected": start}
    loss = one_by_one(choice, {**inputs, "chosen_nll": nll, "gold_nll": nll})
    return [loss.detach(), *torch.autograd.grad(loss.sum(), [chosen, rejected])]


def of_responses(choice: Choice, log_ratio: Tensor) -> list[Tensor]:
    """Loss and gradient at each log ratio, of a desirable and of an undesirable response."""
    losses, gradients = list[Tensor](), list[Tensor]()
    for desirable in (True, False):
        start = torch.full_like(log_ratio, -_reach(choice) - 1)
        scores = (start + log_ratio).requires_grad_()
        zero = torch.zeros((), dtype=torch.float64)
        inputs = {"scores": scores, "ref_scores": start, "reference_kl": zero, "reward_shift": zero}
        inputs["desirable"] = torch.full_like(log_ratio, desirable, dtype=torch.bool)
        loss = one_by_one(choice, inputs)
        losses.append(loss.detach())
        gradients += torch.autograd.grad(loss.sum(), scores)
    return [*losses, *gradients]


def of_nll(choice: Choice, nll: Tensor) -> list[Tensor]:
    """Loss and gradient at each negative log-likelihood."""
    nll = nll.clone().requires_grad_()
    loss = one_by_one(choice, {"chosen_nll": nll})
    return [loss.detach(), *torch.autograd.grad(loss.sum(), nll)]


PAIRS = Axes(
    "pairs",
    of_pairs,
    "margin of the chosen response over the rejected one (nats)",
    (
        ("loss", "loss of the pair"),
        ("gradient, chosen response", "d loss / d log π(chosen)"),
        ("gradient, rejected response", "d loss / d log π(rejected)"),
    ),
    3,
)
RESPONSES = Axes(
    "responses, desirable or not",
    of_responses,
    "log π(response) − log π_ref(response) (nats)",
    (
        ("a desirable response", "loss of the response"),
        ("an undesirable response", "loss of the response"),
        ("a desirable response", "d loss / d log π"),
        ("an undesirable response", "d loss / d log π"),
    ),
    2,
)
NLLS = Axes(
    "the chosen response alone",
    of_nll,
    "mean −log π per token of the chosen response (nats)",
    (("loss", "loss of the response"), ("gradient", "d loss / d (−log π)")),
    2,
)


def _axes(choice: Choice) -> Axes:
    if "scores" in choice.loss.needs:
        return RESPONSES
    return PAIRS if "chosen" in choice.loss.needs else NLLS


def _reach(choice: Choice) -> float:
    beta = choice.value("beta")
    reach = REACH / beta if isinstance(beta, float | int) and beta > 0 else REACH
    return min(reach, WIDEST_AVERAGE) if choice.average else reach


def _notes(chosen: Sequence[Choice], axes: Axes) -> list[str]:
    notes = []
    if axes is PAIRS:
        with_reference = [one.name for one in chosen if "ref_chosen" in one.loss.needs]
        if with_reference:
            notes.append("The margin is that of the log ratios to the reference.")
        if averages := [one.name for one in chosen if one.average]:
            notes.append(f"Scores are averages per token in {', '.join(averages)}.")
        if any({"chosen_nll", "gold_nll"} & {*one.loss.needs} for one in chosen):
            notes.append(f"The negative log-likelihood beside the margin is held at {NLL:g} nat.")
    if axes is RESPONSES:
        notes.append("KTO's reference point and BCO's shift are 0.")
    if over := [one.name for one in chosen if one.loss.over_batch]:
        notes.append(f"{', '.join(over)}: the batch, whose statistics the loss uses, is this one pair.")
    return notes
