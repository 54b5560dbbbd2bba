"""Policy losses: value and gradient weight against the ratio, for a better and for a worse response."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.data import Panel, Picture
from composer_plugins.plotting.lines import POINTS, Axes, call, drawn, ends_of, marks_of, with_gradients

# Of the sampled token under the old policy. The first one is drawn unless the second shows more bends:
# a ratio of 8 needs a rare token, and a drop of 0.2 in probability a likely one.
PROBABILITIES = (0.25, 0.05)
REST = (0.5, 0.3, 0.2)  # how three other tokens share the probability that is left
TEACHER = (2.0, 0.5)  # the teacher's probability over the old policy's
LOWEST = 0.02  # ratio
LEAST, WIDEST = 2.5, 4.0  # the axis ends between them, but where all bends lie further out
FURTHEST, NARROW = 20.0, 0.02  # up to where bends are looked for, and when a clip range is magnified


def picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradient weight of each loss; a loss of a teacher has its gap in place of an advantage."""
    # The first loss of each: True for losses of a teacher.
    first = {"teacher_logprobs" in one.loss.needs: one.name for one in reversed(chosen)}
    if len(first) > 1:
        problem = f"{first[True]} compares with a teacher, and {first[False]} takes advantages"
        raise ConfigError("plot", problem, "draw them apart")
    by_teacher = True in first
    axes = {p: _axes(p, by_teacher) for p in PROBABILITIES}
    # Bends are looked for finely near a ratio of 1.
    found = {
        p: [ends_of(one, of, _fine(min(FURTHEST, 0.99 / p))) for one in chosen] for p, of in axes.items()
    }
    marks = {p: marks_of(of) for p, of in found.items()}
    probability = max(PROBABILITIES, key=lambda p: len(marks[p]))
    low, high = _window(marks[probability])
    high = min(high, 0.99 / probability)
    x = torch.linspace(low, high, POINTS, dtype=torch.float64)
    panels = drawn(chosen, axes[probability], x, found[probability])
    old = "the old policy, which is also the sampler and the reference"
    notes = [f"One token, of probability {probability:g} under {old}."]
    if not by_teacher:
        notes.append("Gradient weight: d loss / d log π, divided by −A. REINFORCE has 1 everywhere.")
    if marks[probability]:
        notes.append("Thin lines: where the gradient jumps, or begins or ends to be constant.")
    if beyond := [f"{mark:g}" for mark in marks[probability] if mark > high]:
        notes.append(f"Beyond the axis, at {_and(beyond)}, there is another bend.")
    if entropic := [one.name for one in chosen if "entropies" in (*one.loss.needs, *one.optional)]:
        notes.append(f"{_and(entropic)}: the entropy is over the token and three others.")
    if over := [one.name for one in chosen if one.loss.over_batch]:
        notes.append(f"{_and(over)}: the batch, whose statistics the loss uses, is this one token.")
    if whole := [one.name for one in chosen if _is_of_sequence(one)]:
        notes.append(f"The ratio of {_and(whole)} is the ratio of the whole response, here one token long.")
    return Picture(panels, 2, tuple(notes))


def _axes(probability: float, by_teacher: bool) -> Axes:
    """Against the ratio of a token of this probability: two panels of values, and two of gradients."""
    if by_teacher:
        signs, weight = TEACHER, "gradient: d loss / d log π"
        cases = [f"teacher: {s:g} × the old probability" for s in TEACHER]
    else:
        signs, weight = (1.0, -1.0), "gradient weight"
        cases = ["A = +1 (better than its group)", "A = −1 (worse)"]
    labels = ("loss of the token", weight)
    panels = [Panel(case, "ratio π / π_old", y, reference=1.0) for y in labels for case in cases]
    measures = [partial(measure, probability=probability, sign=sign) for sign in signs]
    return Axes(tuple(measures), tuple(panels), (2, 3, 2, 3))


def measure(choice: Choice, ratio: Tensor, probability: float, sign: float) -> tuple[Tensor, Tensor]:
    """The loss of one token at each ratio, and its gradient weight.

    `sign` is the advantage, or for a loss of a teacher the teacher's probability over the old policy's.
    """
    old = torch.full_like(ratio, math.log(probability))[:, None]
    logprobs = (old + ratio.log()[:, None]).requires_grad_()
    from_teacher = "teacher_logprobs" in choice.loss.needs
    teacher = old + math.log(sign) if from_teacher else old
    inputs = _inputs(logprobs, old, 1.0 if from_teacher else sign, teacher)
    loss, gradient = with_gradients(choice, inputs, logprobs)
    return loss, gradient / (1.0 if from_teacher else -sign)


def _inputs(logprobs: Tensor, old: Tensor, advantage: float, teacher: Tensor) -> dict[str, Tensor]:
    shares = torch.tensor(REST, dtype=torch.float64).log()

    def whole(sampled: Tensor) -> Tensor:
        rest = torch.log1p(-sampled.exp())[..., None] + shares
        return torch.cat([sampled[..., None], rest], -1)

    every = whole(logprobs)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": old,
        "region_logprobs": old,
        "ref_logprobs": old,
        "teacher_logprobs": teacher,
        "advantages": torch.full_like(old, advantage),
        "mask": torch.ones_like(old, dtype=torch.bool),
        "log_weights": torch.zeros_like(old),
        "uniform": torch.zeros_like(old),
        "topk_logprobs": every,
        "rollout_topk_logprobs": whole(old),
        "support_logprobs": every,
        "entropies": -(every.exp() * every).sum(-1),
        "rollout_support_logprobs": whole(old),
    }


def _fine(high: float) -> Tensor:
    """Ratios from `LOWEST` to `high`, the closer the nearer to 1."""
    near = torch.logspace(-5, -1.5, 60, dtype=torch.float64)
    far = torch.logspace(math.log10(LOWEST), math.log10(high), 300, dtype=torch.float64)
    far = far[(far - 1).abs() > near[-1]]
    return torch.cat([1 - near, torch.ones(1, dtype=torch.float64), 1 + near, far]).sort().values


def _window(marks: Sequence[float]) -> tuple[float, float]:
    """The ratios to show: the bends with some room, magnified where all are very near to 1."""
    furthest = max((abs(mark - 1) for mark in marks), default=1.0)
    if furthest < NARROW:
        return 1 - 3 * furthest, 1 + 3 * furthest
    above = [mark for mark in marks if mark > 1]
    shown = [mark for mark in above if mark <= WIDEST] or above
    return LOWEST, max(LEAST, 1.25 * max(shown, default=1.0))


def _is_of_sequence(choice: Choice) -> bool:
    """Whether a token's loss depends on the log-probability of another token of its response."""
    if choice.loss.over_batch:
        return False
    old = torch.full((2, 2), -2.0, dtype=torch.float64)
    logprobs = old.clone()
    logprobs[1, 1] += 1e-5
    first = call(choice, _inputs(logprobs, old, 1.0, old))[:, 0]
    return bool(first[0] != first[1])


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
