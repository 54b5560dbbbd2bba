"""KL estimators against the log ratio, and rollout corrections against the ratio."""

from collections.abc import Sequence

import torch
from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.data import Panel, Picture
from composer_plugins.plotting.lines import POINTS, Axes, call, drawn, ends_of, marks_of, with_gradients

NATS = 3.0
WIDEST, MOST = 3.0, 12.0  # ratios of a correction
REFERENCE = -4.0  # log-probability of the token under the reference, so that 3 nats more is still below 0


def kl_picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradient of each estimator against log pi - log pi_ref."""
    x = torch.linspace(-NATS, NATS, POINTS + 1, dtype=torch.float64)
    notes = []
    if corrected := [one.name for one in chosen if "old_logprobs" in one.loss.needs]:
        notes.append(f"{', '.join(corrected)}: the old policy is the current one.")
    return Picture(drawn(chosen, KL, x, [ends_of(one, KL, x) for one in chosen]), 2, tuple(notes))


def kl(choice: Choice, log_ratio: Tensor) -> list[Tensor]:
    """The estimate of one token at each log ratio, and its gradient."""
    reference = torch.full_like(log_ratio, REFERENCE)[:, None]
    logprobs = (reference + log_ratio[:, None]).requires_grad_()
    mask = torch.ones_like(reference, dtype=torch.bool)
    inputs = {"logprobs": logprobs, "old_logprobs": logprobs.detach(), "ref_logprobs": reference}
    return with_gradients(choice, {**inputs, "mask": mask}, logprobs)


def correction_picture(chosen: Sequence[Choice]) -> Picture:
    """The weight of a token against the ratio of the trained policy to the one that sampled."""
    far = torch.linspace(0.01, MOST, 1200, dtype=torch.float64)
    found = [ends_of(one, CORRECTION, far) for one in chosen]
    high = max([WIDEST, *(1.25 * mark for mark in marks_of(found))])
    x = torch.linspace(0.01, high, POINTS, dtype=torch.float64)
    notes = (
        "A response of one token: its own ratio is also the ratio of the sequence.",
        "Thin lines: where the weight jumps, or begins or ends to be constant.",
    )
    return Picture(drawn(chosen, CORRECTION, x, found), 1, notes)


def weight(choice: Choice, ratio: Tensor) -> tuple[Tensor]:
    """The weight that a correction gives to a token at each ratio."""
    rollout = torch.full_like(ratio, REFERENCE)[:, None]
    inputs = {"old_logprobs": rollout + ratio.log()[:, None], "rollout_logprobs": rollout}
    mask = torch.ones_like(rollout, dtype=torch.bool)
    return (call(choice, {**inputs, "mask": mask}).squeeze(-1).detach(),)


LOG_RATIO = "log π − log π_ref of the sampled token (nats)"
KL = Axes(
    (kl,),
    (
        Panel("estimate", LOG_RATIO, "KL estimate (nats)", reference=0.0),
        Panel("gradient", LOG_RATIO, "d estimate / d log π", reference=0.0),
    ),
    (1, 1),
)
RATIO = "ratio π_old / π_rollout of the token"
CORRECTION = Axes((weight,), (Panel("weight of the token's loss", RATIO, "weight", reference=1.0),), (0,))
