"""Our losses in verl's registries beside verl's own: the claims of `conform`, through the adapter."""

import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from composer_plugins.conformance.claims import GRADIENT, Claim, Compared
from composer_plugins.conformance.verl_claims import policy as claims
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.advantages import GAMMAS, claim, precision
from composer_plugins.conformance.verl_claims.batches import FLOAT64, Rollouts, rollouts
from composer_plugins.conformance.verl_claims.token_advantages import cut_to_a_power_of_two, for_whitening
from composer_plugins.findings import ComposerWarning
from composer_plugins.testing.draws import Draw
from parity_tests.rigs.verl_calls import algorithm, policy_loss
from parity_tests.rigs.verl_drawn import largest_term

GEO_MEAN = {"clip_ratio_low": [0.01, 0.4], "clip_ratio_high": [0.01, 0.4]}

# Dialects of verl that its registries do not get from us, so that there is nothing to call.
BATCH = "a statistic of the whole batch, and verl passes micro-batches; the kernel: live/verl/test_conform.py"
KERNEL = "the kernel: live/verl/test_conform.py"
LEFT_OUT = {
    "clip_cov@verl": f"{BATCH}; it also draws tokens at random, each side its own",
    "kl_cov@verl": BATCH,
    "gdpo@verl": f"an estimator is handed the sum of the reward's components alone; {KERNEL}",
    "remax@verl": f"verl computes its baselines for its own estimator only; {KERNEL}",
    "gae@verl": f"verl calls its own without asking the registry, and hands no other values; {KERNEL}",
}


def policy(theirs: str, row: str, options: claims.Options, draw: Draw) -> Iterator[Compared]:
    """A loss of both registries; options that are not drawn are those of our dialect."""
    batch, mode, info = claims.draw_case(draw)
    if theirs == "geo_mean":  # one mean over all rows, whatever is set
        mode, info = "seq-mean-token-mean", {"global_batch_size": len(batch.mask)}
        batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape), weights=None)
    drawn = claims.draw_options(draw, theirs, options)
    numbers = drawn if row == claims.ours(theirs).row else claims.numbers_of(row.partition("@")[0])
    actor = upstream.actor(info, **claims.by_name(numbers))
    own, own_gradient, _ = upstream.policy_loss(theirs, batch, actor, mode)
    params, name = claims.our_params(row, drawn), f"composer/{row.partition('@')[0]}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # of a reduction that is not the loss's own
        loss, gradient, _ = policy_loss(name, batch, mode, info, policy=row, policy_params=params)
    forced = claims.ours(theirs).mode
    scale = largest_term(claims.our_kernel(row, drawn), batch, forced or mode, info)
    yield Compared(loss, own, batch.mask.numel(), scale)
    yield Compared(gradient, own_gradient, batch.mask.shape[1], what=GRADIENT)


def policies() -> list[Claim]:
    """Every policy loss that both registries have."""
    rows = [(name, claims.ours(name).row, theirs.options) for name, theirs in claims.LOSSES.items()]
    shared = {row for _, row, _ in rows}
    rows += [("vanilla", row, {}) for row in (f"{one}@verl" for one in claims.VANILLA) if row not in shared]
    rows.append(("geo_mean", claims.ours("geo_mean").row, GEO_MEAN))
    return [claims.policy_claim(row, name, partial(policy, name, row, opts)) for name, row, opts in rows]


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
ROUNDED = "groups of one too, where verl rounds 1 + eps to float32"
ESTIMATORS = [
    Estimator("grpo@verl", "grpo", eps=EPS),
    Estimator("grpo@verl", "grpo", 1, EPS, torch.float32, note=ROUNDED),
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
        "index": upstream.names(batch.ids.tolist()),
    }


def asked(name: str, **given: Any) -> tuple[Tensor, Tensor]:
    """A registered estimator's answer, by those of the keywords that it has."""
    function = get_adv_estimator_fn(name)
    parameters = inspect.signature(function).parameters.values()
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = given if everything else {p.name: given[p.name] for p in parameters if p.name in given}
    return function(**known)


def in_float64(batch: Rollouts) -> Rollouts:
    """As many unmasked tokens as let verl whiten in float64."""
    batch, dtype = for_whitening(batch)
    return batch if dtype == FLOAT64 else cut_to_a_power_of_two(batch)


def advantage(row: Estimator, draw: Draw) -> Iterator[Compared]:
    """An estimator of both registries, on the same rollouts."""
    batch, gamma = rollouts(draw, row.min_group), draw.choose(GAMMAS, "gamma")
    batch = in_float64(batch) if row.whitened else batch
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
        yield Compared(ours, theirs, 2 * int(batch.mask.sum()), whitening(row, batch, returns))
        return
    alpha = len(batch.rewards) / max(1, int(batch.rewards.count_nonzero()))  # gpg's
    for group in batch.ids.unique():
        rows = batch.ids == group
        scale = precision(batch, rows, row.eps)
        scale = {"gpg": alpha * scale}.get(row.theirs, scale)
        yield Compared(ours[rows], theirs[rows], 2 * len(batch.ids), scale, row.dtype)


def whitening(row: Estimator, batch: Rollouts, returns: Tensor) -> float:
    """The largest term behind a whitened advantage, which a small deviation magnifies twice."""
    largest, raw = float(batch.rewards.abs().max()) * batch.mask.shape[1], returns
    if "baseline" in row.ours:  # verl returns what is whitened already
        largest, config = float(batch.rewards.abs().max()), algorithm(advantage="dr_grpo@verl")
        raw = asked("composer/dr_grpo", config=config, **keywords(batch))[0]
    divisor = float((raw[batch.mask].var() + 1e-8).sqrt())
    return largest * (1 + largest / divisor) / divisor


def advantages() -> list[Claim]:
    """Every estimator that both registries have."""
    return [claim(row.ours, row.theirs, partial(advantage, row), row.note) for row in ESTIMATORS]
