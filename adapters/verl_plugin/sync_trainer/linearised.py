"""The replay loss as a coefficient of each token's log-probability.

A pairwise loss cannot be computed where verl computes losses: the two completions of a pair may be in
different micro-batches, or on different ranks. Its gradient at the policy that the step began with can: it
is a coefficient per token, in a term that is linear in the log-probabilities.

    c_t = d loss / d log pi(y_t),     term = sum_t c_t log pi(y_t)

The term's gradient is the preference loss's own before the first update of the step. Later updates of the
step (mini-batches, ppo_epochs) use coefficients as old as PPO's old_logprobs.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from composer_plugins.columns import CHOSEN
from composer_plugins.kernels.preference import weighted
from composer_plugins.kernels.types import PairLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice

BySide = Mapping[str, Sequence[Tensor]]  # by side of the pairs, log pi of each token of each completion


def linearise(
    choice: Choice, logprobs: BySide, ref_logprobs: BySide, weights: Tensor
) -> tuple[PairLoss, list[Tensor]]:
    """Return the weighted loss of each pair, and the coefficients of each completion's tokens.

    The coefficients belong to the mean over pairs, in float64, in the order of `logprobs`. A side that the
    loss does not need is absent from `logprobs`; `ref_logprobs` are empty for a loss without a reference.
    """
    leaves = {side: [row.detach().double().requires_grad_() for row in logprobs[side]] for side in logprobs}
    given = {side: _scores(rows, average=choice.average) for side, rows in leaves.items()}
    given |= {f"ref_{side}": _scores(rows, average=choice.average) for side, rows in ref_logprobs.items()}
    if CHOSEN in leaves:
        given["chosen_nll"] = -_scores(leaves[CHOSEN], average=True)
    loss = weighted(call(choice, given, check=True), weights)
    coefficients = torch.autograd.grad(loss.loss.mean(), [row for rows in leaves.values() for row in rows])
    return PairLoss(loss.loss.detach(), loss.metrics), list(coefficients)


def _scores(rows: Sequence[Tensor], *, average: bool) -> Tensor:
    """log pi of each completion [pairs], summed or averaged over its tokens."""
    return torch.stack([row.double().mean() if average else row.double().sum() for row in rows])
