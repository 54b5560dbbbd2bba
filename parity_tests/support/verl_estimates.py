"""The estimators' part of the parity table: ours in verl's registry with verl's own, on prepared rollouts.

An error is relative to the largest reward over the deviation that divides it.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import hypothesis.strategies as st
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from composer_plugins.diagnosis import ComposerWarning
from parity_tests.adapters.verl.test_plugin import algorithm
from parity_tests.live.verl.test_advantages import GAMMAS, cut_to_a_power_of_two, for_whitening, precision
from parity_tests.support.verl_claims import Claim, Error, error
from parity_tests.support.verl_facts import FLOAT64, Rollouts, names, rollouts


def in_float64(batch: Rollouts) -> Rollouts:
    """As many live tokens as let verl whiten in float64."""
    batch, dtype = for_whitening(batch)
    return batch if dtype == FLOAT64 else cut_to_a_power_of_two(batch)


class Estimator(NamedTuple):
    """One of verl's estimators in our terms."""

    ours: str
    theirs: str
    min_group: int = 2
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
        1,
        EPS,
        torch.float32,
        note="groups of one too, where verl rounds 1 + eps to float32",
    ),
    Estimator("grpo@verl", "grpo_vectorized", 1, EPS, torch.float32, note="verl's is in float32"),
    Estimator("dr_grpo@verl", "grpo", 1, options={"norm_adv_by_std_in_grpo": False}),
    Estimator("rloo@verl", "rloo", 1),
    Estimator("rloo@verl", "rloo_vectorized", 1, params={"singleton": "zero"}),
    Estimator("opo@verl", "opo", 1),
    Estimator("gpg@verl", "gpg", dtype=torch.float32, note="verl's alpha is a float32"),
    Estimator("pass_at_k@verl", "grpo_passk", eps=EPS, options={"config": {}}),
    Estimator("reinforce_pp@verl", "reinforce_plus_plus", whitened=True),
    Estimator("reinforce_pp_baseline@verl", "reinforce_plus_plus_baseline", whitened=True),
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
        batch = draw(rollouts(min_group=row.min_group))
        return in_float64(batch) if row.whitened else batch, draw(GAMMAS)

    def errors(case: Any) -> tuple[Error, ...]:
        batch, gamma = case
        given = keywords(batch)
        params = dict(row.params) | ({"gamma": gamma} if row.theirs == "reinforce_plus_plus" else {})
        config = algorithm(advantage=row.ours, advantage_params=params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ComposerWarning)  # of rewards at masked tokens
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
