"""Compare a policy loss with plain Python: a function of a row gives the value and slope of each token."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk

Batch = dict[str, Tensor]


class Token(NamedTuple):
    """An unmasked token: log-probabilities under three policies, the advantage, the place in its row."""

    logprob: float
    old: float
    rollout: float
    advantage: float
    place: int

    @property
    def log_ratio(self) -> float:
        """To the old policy."""
        return self.logprob - self.old


class Piece(NamedTuple):
    """The value of a token's loss, and the slope of the sum over its row in the token's log-probability."""

    value: float
    slope: float


Row = Sequence[Token]
Rows = Sequence[Row]


def with_rollout(batch: Batch) -> Batch:
    """The batch with the log-probabilities of a third policy, near the old one."""
    moved = batch["old_logprobs"] + 0.3 * (5 * batch["logprobs"]).sin()
    return batch | {"rollout_logprobs": moved.clamp(max=0)}


def rows(batch: Batch) -> list[list[Token]]:
    """The unmasked tokens of each row."""
    batch = batch if "rollout_logprobs" in batch else with_rollout(batch)
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
    columns = [batch[name].detach().expand(batch["mask"].shape).tolist() for name in names]
    found = []
    for masks, *values in zip(batch["mask"].tolist(), *columns, strict=True):
        tokens = zip(*values, range(len(masks)), strict=True)
        found.append([Token(*one) for one, kept in zip(tokens, masks, strict=True) if kept])
    return found


def assert_equals_loop(
    kernel: Callable[..., TokenLoss],
    batch: Batch,
    wanted: Callable[[Rows], Sequence[Sequence[Piece]]],
    needs: Sequence[str] = ("logprobs", "old_logprobs", "advantages", "mask"),
    *,
    magnitude: float | None = None,
    **params: Any,
) -> TokenLoss:
    """Assert that value and gradient are those of a function of all rows, with junk at masked tokens."""
    batch, mask = with_rollout(batch), batch["mask"]
    dirty = {
        name: with_junk(x, mask) if name != "advantages" and x.is_floating_point() else x
        for name, x in batch.items()
    }
    logprobs = dirty["logprobs"] = dirty["logprobs"].clone().requires_grad_()
    token = kernel(*(dirty[name] for name in needs), **params)
    (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
    values, slopes = torch.zeros_like(batch["logprobs"]), torch.zeros_like(batch["logprobs"])
    for i, (row, pieces) in enumerate(zip(rows(batch), wanted(rows(batch)), strict=True)):
        for one, piece in zip(row, pieces, strict=True):
            values[i, one.place], slopes[i, one.place] = piece
    # exp() turns the absolute rounding of a log ratio into a relative one of the ratio.
    gap = 2 * max(
        float((batch["logprobs"] - batch[f"{one}_logprobs"]).abs().max()) for one in ("old", "rollout")
    )
    for ours, theirs, what in ((token.loss, values, "value"), (gradient, slopes, "gradient")):
        largest = (1 + gap) * max(float(theirs.abs().max()), magnitude or 0.0)
        assert_parity(ours, theirs, terms=mask.shape[-1] + 1, magnitude=largest, what=what)
    for name, (value, where) in token.metrics.items():
        assert torch.equal(where, mask) and value[mask].isfinite().all() and not value.requires_grad, name
    return token


def by_token(piece: Callable[[Token], Piece]) -> Callable[[Rows], list[list[Piece]]]:
    """A loss of each token on its own."""
    return lambda found: [[piece(one) for one in row] for row in found]


def by_row(pieces: Callable[[Row], list[Piece]]) -> Callable[[Rows], list[list[Piece]]]:
    """A loss that needs the whole row."""
    return lambda found: [pieces(row) if row else [] for row in found]


def clipped(r: float, a: float, low: float, high: float, dual: float | None = None) -> Piece:
    """PPO's bound, of a ratio r, and its slope in the log ratio; `low` and `high` are bounds of the ratio."""
    free, bounded = -a * r, -a * min(max(r, low), high)
    value, slope = (free, free) if free >= bounded else (bounded, 0.0)
    if dual is not None and a < 0 and -a * dual < value:
        return Piece(-a * dual, 0.0)
    return Piece(value, slope)
