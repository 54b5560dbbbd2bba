"""Compare a policy loss with plain Python: a function of a row gives the value and slope of each token."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk

Batch = dict[str, Tensor]


class Token(NamedTuple):
    """An unmasked token: its log-probabilities, the advantage, the place in its row."""

    logprob: float
    old: float
    rollout: float
    region: float  # the centre of a trust region: the rollout policy unless it is given
    teacher: float
    uniform: float  # a random number in [0, 1)
    advantage: float  # 0 where the loss is given none
    place: int

    @property
    def log_ratio(self) -> float:
        """To the old policy."""
        return self.logprob - self.old

    @property
    def drift(self) -> float:
        """The log ratio to the rollout policy."""
        return self.logprob - self.rollout


class Piece(NamedTuple):
    """A token's loss, the slope of the loss of its row in its log-probability, and what is logged."""

    value: float
    slope: float
    metrics: dict[str, float] | None = None  # None is not compared


Row = Sequence[Token]
Rows = Sequence[Row]
Loop = Callable[..., Sequence[Sequence[Piece]]]  # of all rows, and the parameters by keyword


def with_other_policies(batch: Batch) -> Batch:
    """The batch with log-probabilities of other policies, and with a random number for each token."""
    logprobs, old = batch["logprobs"], batch["old_logprobs"]
    return batch | {
        "rollout_logprobs": (old + 0.3 * (5 * logprobs).sin()).clamp(max=0),
        "region_logprobs": (old - 0.1).roll(1, 0),
        "teacher_logprobs": (0.7 * logprobs + old.sin()).clamp(max=0),
        "uniform": (1e3 * logprobs).frac().abs(),
    }


def rows_of(batch: Batch) -> list[list[Token]]:
    """The unmasked tokens of each row."""
    names = [f"{name}logprobs" for name in ("", "old_", "rollout_", "region_", "teacher_")]
    columns = [batch[name].expand(batch["mask"].shape).tolist() for name in (*names, "uniform", "advantages")]
    found = []
    for masks, *values in zip(batch["mask"].tolist(), *columns, strict=True):
        tokens = zip(*values, range(len(masks)), strict=True)
        found.append([Token(*one) for one, kept in zip(tokens, masks, strict=True) if kept])
    return found


def assert_equals_loop(
    row: Loss,
    loop: Loop,
    batch: Batch,
    *,
    by_token: bool,
    optional: bool,
    lost: Callable[[list[Piece]], float] = lambda pieces: 1.0,
    least: float = 0.0,
    **params: Any,
) -> None:
    """Assert that value, gradient and metrics are those of a loop over rows, with junk at masked tokens.

    `by_token` gives each token an advantage of its own, and `optional` passes the optional inputs too. `lost`
    is how much larger the relative error of a loss is than that of a log ratio, and `least` is the smallest
    magnitude of its terms.
    """
    batch, mask = with_other_policies(batch), batch["mask"]
    if by_token:
        batch["advantages"] = batch["advantages"] + (5 * batch["logprobs"]).sin()
    taken = [name for name in row.optional if name in batch and (optional or name == "uniform")]
    if "region_logprobs" not in taken:
        batch["region_logprobs"] = batch["rollout_logprobs"]
    if "advantages" not in (*row.needs, *taken):
        batch["advantages"] = torch.zeros_like(batch["advantages"])

    dirty = {name: with_junk(x, mask) if x.shape == mask.shape else x for name, x in batch.items()}
    dirty |= {"mask": mask, "logprobs": dirty["logprobs"].requires_grad_()}
    ours = row.kernel()(
        *(dirty[name] for name in row.needs), **{name: dirty[name] for name in taken}, **params
    )
    (gradient,) = torch.autograd.grad(ours.loss.sum(), dirty["logprobs"])

    pieces = [[Piece(0.0, 0.0) for _ in masks] for masks in mask]
    tokens = rows_of(batch)
    for i, found in enumerate(loop(tokens, **row.defaults | params)):
        for token, piece in zip(tokens[i], found, strict=True):
            pieces[i][token.place] = piece
    flat = [piece for one in pieces for piece in one]
    others = {name for name in row.needs if name.endswith("_logprobs")}
    # exp() turns the absolute rounding of a log ratio into a relative one of the ratio.
    gaps = [float((batch["logprobs"] - batch[name]).abs().max()) for name in others]
    spread = 1 + max(gaps, default=0.0) * max(1.0, lost(flat))

    def compare(found: Tensor, wanted: list[float], what: str) -> None:
        theirs = found.new_tensor(wanted, dtype=torch.float64).view(mask.shape)
        largest = spread * max(least, float(theirs.abs().max()))
        assert_parity(found, theirs, terms=mask.shape[-1], magnitude=largest, what=what)

    compare(ours.loss, [piece.value for piece in flat], "value")
    compare(gradient, [piece.slope for piece in flat], "gradient")
    for name, (value, where) in ours.metrics.items():
        assert torch.equal(where, mask) and value[mask].isfinite().all() and not value.requires_grad, name
        logged = [piece.metrics for piece, kept in zip(flat, mask.flatten(), strict=True) if kept]
        if None not in logged:
            kept = [(piece.metrics or {}).get(name, 0.0) for piece in flat]
            compare(torch.where(mask, value, 0.0), kept, name)


def by_token(piece: Callable[..., Piece]) -> Loop:
    """A loss of each token on its own."""
    return lambda rows, **params: [[piece(one, **params) for one in row] for row in rows]


def by_row(pieces: Callable[..., list[Piece]]) -> Loop:
    """A loss that needs the whole row."""
    return lambda rows, **params: [pieces(row, **params) if row else [] for row in rows]


def clipped(
    r: float, a: float, low: float, high: float, dual: float | None = None, cap: float | None = None
) -> Piece:
    """PPO's bound, piece by piece: the steeper of two, then the dual clip. The slope is in the log ratio.

    `low` and `high` are bounds of the ratio r, and the unclipped ratio is at most `cap`.
    """
    cap = math.inf if cap is None else cap
    free = Piece(-a * r, -a * r) if r < cap else Piece(-a * cap, 0.0)
    bounded = Piece(-a * r, -a * r) if low < r < high else Piece(-a * min(max(r, low), high), 0.0)
    worse = max(free, bounded, key=lambda piece: piece.value)
    return Piece(-a * dual, 0.0) if dual and a < 0 and -a * dual < worse.value else worse


def binary_kl(p: float, q: float) -> float:
    """KL(Bernoulli(p) || Bernoulli(q)); 1e-8 keeps upstream's logarithm finite at q = 1."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
