"""KL estimators against the log ratio, and rollout corrections against the ratio."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.bends import bends, with_both_sides
from composer_plugins.plotting.calls import call
from composer_plugins.plotting.data import Curves, Panel, Picture, with_series

POINTS, NATS = 400, 3.0
WIDEST, MOST = 3.0, 12.0  # ratios of a correction
REFERENCE = -4.0  # log-probability of the token under the reference, so that 3 nats more is still below 0


def kl_picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradient of each estimator against log pi - log pi_ref."""
    x = torch.linspace(-NATS, NATS, POINTS + 1, dtype=torch.float64)
    found = [bends(partial(_kl_gradient, one), x) for one in chosen]
    x = with_both_sides(x, [mark for ends in found for mark in ends.marks])
    curves = [
        Curves(one, tuple((x, y) for y in kl(one, x)), (ends._replace(cap=None), ends))
        for one, ends in zip(chosen, found, strict=True)
    ]
    x_label = "log π − log π_ref of the sampled token (nats)"
    blank = [
        Panel("estimate", x_label, "KL estimate (nats)", reference=0.0),
        Panel("gradient", x_label, "d estimate / d log π", reference=0.0),
    ]
    notes = []
    if corrected := [one.name for one in chosen if "old_logprobs" in one.loss.needs]:
        notes.append(f"{', '.join(corrected)}: the old policy is the current one.")
    return Picture("", tuple(with_series(p, curves, i) for i, p in enumerate(blank)), 2, tuple(notes))


def kl(choice: Choice, log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """The estimate of one token at each log ratio, and its gradient."""
    reference = torch.full_like(log_ratio, REFERENCE)[:, None]
    logprobs = (reference + log_ratio[:, None]).requires_grad_()
    mask = torch.ones_like(reference, dtype=torch.bool)
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "ref_logprobs": reference}
    value = call(choice, {**inputs, "mask": mask}).squeeze(-1)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    return value.detach(), gradient.squeeze(-1)


def _kl_gradient(choice: Choice, log_ratio: Tensor) -> Tensor:
    return kl(choice, log_ratio)[1]


def correction_picture(chosen: Sequence[Choice]) -> Picture:
    """The weight of a token against the ratio of the trained policy to the one that sampled."""
    far = torch.linspace(0.01, MOST, 1200, dtype=torch.float64)
    found = [bends(partial(weight, one), far) for one in chosen]
    marks = [mark for ends in found for mark in ends.marks]
    high = max([WIDEST, *(1.25 * mark for mark in marks)])
    x = with_both_sides(torch.linspace(0.01, high, POINTS, dtype=torch.float64), marks)
    curves = [Curves(one, ((x, weight(one, x)),), (ends,)) for one, ends in zip(chosen, found, strict=True)]
    panel = Panel(
        "weight of the token's loss", "ratio π_old / π_rollout of the token", "weight", reference=1.0
    )
    notes = (
        "A response of one token: its own ratio is also that of the sequence.",
        "Thin lines: where the weight jumps, or begins or ends to be constant.",
    )
    return Picture("", (with_series(panel, curves, 0),), 1, notes)


def weight(choice: Choice, ratio: Tensor) -> Tensor:
    """The weight that a correction gives to a token at each ratio."""
    rollout = torch.full_like(ratio, REFERENCE)[:, None]
    inputs = {"old_logprobs": rollout + ratio.log()[:, None], "rollout_logprobs": rollout}
    mask = torch.ones_like(rollout, dtype=torch.bool)
    return call(choice, {**inputs, "mask": mask}).squeeze(-1).detach()
