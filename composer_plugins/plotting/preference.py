"""Preference losses: value and gradients against the margin of a pair, or the log ratio of one response."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.data import Panel, Picture
from composer_plugins.plotting.lines import POINTS, Axes, drawn, ends_of, with_gradients

REACH = 5.0  # the margin times beta at the ends of the axis: a sigmoid is then flat
WIDEST_AVERAGE = 4.0  # nats per token
NLL = 1.0  # nats per token, where a loss has one besides its margin


def picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradients of each loss; all must take the same things: pairs, or responses of their own."""
    # The first loss of each: of those that take responses, pairs, or the chosen response alone.
    first = {_takes(one): one.name for one in reversed(chosen)}
    if len(first) > 1:
        each = ", ".join(f"{name!r} takes {takes}" for takes, name in reversed(first.items()))
        raise ConfigError("plot", f"their axes differ: {each}", "draw them apart")
    axes = AXES[_takes(chosen[0])]
    reach = max(_reach(one) for one in chosen)
    x = torch.linspace(0.0 if axes is NLLS else -reach, reach, POINTS + 1, dtype=torch.float64)
    panels = drawn(chosen, axes, x, [ends_of(one, axes, x) for one in chosen])
    return Picture(panels, 3 if axes is PAIRS else 2, tuple(_notes(chosen, axes)))


def of_pairs(choice: Choice, margin: Tensor) -> list[Tensor]:
    """Loss and both gradients at each margin: the chosen score goes up by half of it, the rejected down."""
    reach = max(_reach(choice), margin.abs().max().item())
    start = torch.full_like(margin, -reach / 2 - (0.05 if choice.average else 1))
    chosen, rejected = (start + margin / 2).requires_grad_(), (start - margin / 2).requires_grad_()
    nll = torch.full_like(margin, NLL)
    inputs = {"chosen": chosen, "rejected": rejected, "ref_chosen": start, "ref_rejected": start}
    return with_gradients(choice, {**inputs, "chosen_nll": nll, "gold_nll": nll}, chosen, rejected)


def of_responses(choice: Choice, log_ratio: Tensor, *, desirable: bool) -> list[Tensor]:
    """Loss and gradient at each log ratio, of desirable or of undesirable responses."""
    start = torch.full_like(log_ratio, -_reach(choice) - 1)
    scores = (start + log_ratio).requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    inputs = {"scores": scores, "ref_scores": start, "reference_kl": zero, "reward_shift": zero}
    inputs["desirable"] = torch.full_like(log_ratio, desirable, dtype=torch.bool)
    return with_gradients(choice, inputs, scores)


def of_nll(choice: Choice, nll: Tensor) -> list[Tensor]:
    """Loss and gradient at each negative log-likelihood."""
    nll = nll.clone().requires_grad_()
    return with_gradients(choice, {"chosen_nll": nll}, nll)


MARGIN = "margin of the chosen response over the rejected one (nats)"
PAIRS = Axes(
    (of_pairs,),
    (
        Panel("loss", MARGIN, "loss of the pair", reference=0.0),
        Panel("gradient, chosen response", MARGIN, "d loss / d log π(chosen)", reference=0.0),
        Panel("gradient, rejected response", MARGIN, "d loss / d log π(rejected)", reference=0.0),
    ),
    (1, 1, 2),
)
LOG_RATIO = "log π(response) − log π_ref(response) (nats)"
RESPONSES = Axes(
    (partial(of_responses, desirable=True), partial(of_responses, desirable=False)),
    tuple(
        Panel(f"{which} response", LOG_RATIO, y, reference=0.0)
        for y in ("loss of the response", "d loss / d log π")
        for which in ("a desirable", "an undesirable")
    ),
    (2, 3, 2, 3),
)
MEAN = "mean −log π per token of the chosen response (nats)"
NLLS = Axes(
    (of_nll,),
    (Panel("loss", MEAN, "loss of the response"), Panel("gradient", MEAN, "d loss / d (−log π)")),
    (1, 1),
)
AXES = {"responses, desirable or not": RESPONSES, "pairs": PAIRS, "the chosen response alone": NLLS}


def _takes(choice: Choice) -> str:
    responses, pairs, alone = AXES
    if "scores" in choice.loss.needs:
        return responses
    return pairs if "chosen" in choice.loss.needs else alone


def _reach(choice: Choice) -> float:
    beta = choice.value("beta")
    reach = REACH / beta if isinstance(beta, float | int) and beta > 0 else REACH
    return min(reach, WIDEST_AVERAGE) if choice.average else reach


def _notes(chosen: Sequence[Choice], axes: Axes) -> list[str]:
    notes = []
    if axes is PAIRS:
        if any("ref_chosen" in one.loss.needs for one in chosen):
            notes.append("The margin is the difference of the log ratios to the reference.")
        if averages := [one.name for one in chosen if one.average]:
            notes.append(f"Scores are averages per token in {', '.join(averages)}.")
        if any({"chosen_nll", "gold_nll"} & {*one.loss.needs} for one in chosen):
            notes.append(f"The negative log-likelihood, besides the margin, is fixed at {NLL:g} nat.")
    if axes is RESPONSES:
        notes.append("KTO's reference point and BCO's shift are 0.")
    if over := [one.name for one in chosen if one.loss.over_batch]:
        notes.append(f"{', '.join(over)}: the batch, whose statistics the loss uses, is this one pair.")
    return notes
