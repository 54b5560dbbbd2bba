"""The estimators' part of the parity table: ours in verl's registry with verl's own, on prepared rollouts.

An error is relative to the largest reward over the deviation that divides it. An empty row counts in a
group of verl's and in none of ours: it is in a group of its own here, as a padding row of verl's trainer is.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from parity_tests.adapters.verl.test_plugin import algorithm
from parity_tests.live.verl.test_advantages import GAMMAS, cut_to_a_power_of_two, for_whitening, precision
from parity_tests.support.verl_claims import Claim, Error, error
from parity_tests.support.verl_facts import FLOAT64, Rollouts, names, rollouts


def placed(batch: Rollouts) -> Rollouts:
    """The reward at the last unmasked token, where a reward manager puts it, and an empty row by itself."""
    tokens = batch.mask.shape[1]
    last = (batch.mask * torch.arange(1, tokens + 1)).argmax(1, keepdim=True)
    at_last = torch.zeros(batch.mask.shape, dtype=FLOAT64).scatter(1, last, batch.rewards.unsqueeze(1))
    alone = int(batch.ids.max()) + 1 + torch.arange(len(batch.ids))
    return batch._replace(token_rewards=at_last, ids=torch.where(batch.mask.any(-1), batch.ids, alone))


def pairs(batch: Rollouts) -> Rollouts:
    """No row with a response is left alone: the empty ones of its group get a token."""
    live = batch.mask.any(-1)
    same = batch.ids == batch.ids.unsqueeze(1)
    short = (same & live).sum(1) == 1
    return placed(batch._replace(mask=first_token_of(batch.mask, short & ~live)))


def answered(batch: Rollouts) -> Rollouts:
    """No empty rows."""
    return placed(batch._replace(mask=first_token_of(batch.mask, ~batch.mask.any(-1))))


def first_token_of(mask: Tensor, rows: Tensor) -> Tensor:
    return mask | (rows.unsqueeze(1) & (torch.arange(mask.shape[1]) == 0))


def in_float64(batch: Rollouts) -> Rollouts:
    """As many live tokens as let verl whiten in float64."""
    batch, dtype = for_whitening(batch)
    return placed(batch if dtype == FLOAT64 else cut_to_a_power_of_two(batch))


class Estimator(NamedTuple):
    """One of verl's estimators in our terms."""

    ours: str
    theirs: str
    prepare: Callable[[Rollouts], Rollouts] = pairs
    eps: float | None = None  # what is added to a deviation; None: nothing is divided
    dtype: torch.dtype = FLOAT64
    options: dict[str, Any] = {}  # verl's
    params: dict[str, Any] = {}  # ours
    note: str = ""
    whitened: bool = False


EPS = 1e-6
ESTIMATORS = [
    Estimator("grpo@verl", "grpo", eps=EPS),
    Estimator(
        "grpo@verl",
        "grpo",
        placed,
        EPS,
        torch.float32,
        note="groups of one too, where verl rounds 1 + eps to float32",
    ),
    Estimator("grpo@verl", "grpo_vectorized", placed, EPS, torch.float32, note="verl's is in float32"),
    Estimator("dr_grpo@verl", "grpo", placed, options={"norm_adv_by_std_in_grpo": False}),
    Estimator("rloo@verl", "rloo", placed),
    Estimator("rloo@verl", "rloo_vectorized", placed, params={"singleton": "zero"}),
    Estimator("opo@verl", "opo", placed),
    Estimator(
        "gpg@verl", "gpg", answered, dtype=torch.float32, note="verl's alpha is a float32; no empty rows"
    ),
    Estimator("pass_at_k@verl", "grpo_passk", answered, EPS, options={"config": {}}, note="no empty rows"),
    Estimator("reinforce_pp@verl", "reinforce_plus_plus", in_float64, whitened=True),
    Estimator("reinforce_pp_baseline@verl", "reinforce_plus_plus_baseline", in_float64, whitened=True),
]


def keywords(batch: Rollouts) -> dict[str, Any]:
    """What compute_advantage takes from a batch."""
    return {
        "token_level_rewards": batch.token_rewards,
        "response_mask": batch.mask.long(),
        "index": names(batch.ids.tolist()),
    }


def asked(name: str, **given: Any) -> tuple[Tensor, Tensor]:
    """A registered estimator's answer, by those of the keywords that it has."""
    function = get_adv_estimator_fn(name)
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = given if everything else {p.name: given[p.name] for p in parameters if p.name in given}
    return function(**known)


def advantage_claim(row: Estimator) -> Claim:
    @st.composite
    def cases(draw: st.DrawFn) -> Any:
        return row.prepare(draw(rollouts(min_group=2))), draw(GAMMAS)

    def errors(case: Any) -> tuple[Error, ...]:
        batch, gamma = case
        given = keywords(batch)
        params = dict(row.params) | ({"gamma": gamma} if row.theirs == "reinforce_plus_plus" else {})
        config = algorithm(advantage=row.ours, advantage_params=params)
        (ours, _) = asked(f"composer/{row.ours.partition('@')[0]}", config=config, **given)
        own = {"config": type("Config", (), {"gamma": gamma})} | row.options
        (theirs, returns) = asked(row.theirs, **given | own)
        # Where the mask is False verl may leave something, and 0 / 0 in a group without an unmasked token.
        theirs = torch.where(batch.mask, theirs, 0.0)
        if row.whitened:
            terms = 2 * int(batch.mask.sum())
            return (error(ours, theirs, whitening(row, batch, returns), terms=terms),)
        alpha = len(batch.rewards) / max(1, int(batch.rewards.count_nonzero()))  # gpg's
        found = []
        for group in batch.ids.unique():
            rows = batch.ids == group
            scale = precision(batch, rows, row.eps)
            scale = {"gpg": alpha * scale}.get(row.theirs, scale)
            found.append(error(ours[rows], theirs[rows], scale, terms=2 * len(batch.ids), dtype=row.dtype))
        return (max(found),)

    return Claim(row.ours, row.theirs, cases(), errors, row.note)


def whitening(row: Estimator, batch: Rollouts, returns: Tensor) -> float:
    """The largest term behind a whitened advantage, which a small deviation magnifies twice."""
    largest, raw = float(batch.rewards.abs().max()) * batch.mask.shape[1], returns
    if "baseline" in row.ours:  # verl returns what is whitened already
        config = algorithm(advantage="dr_grpo@verl")
        largest, raw = (
            float(batch.rewards.abs().max()),
            asked("composer/dr_grpo", config=config, **keywords(batch))[0],
        )
    divisor = float((raw[batch.mask].var() + 1e-8).sqrt())
    return largest * (1 + largest / divisor) / divisor


def advantages() -> list[Claim]:
    """Every estimator that both registries have."""
    return [advantage_claim(row) for row in ESTIMATORS]
