"""Our losses in verl's registries beside verl's own: the claims of `conform`, through the adapter."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from composer_plugins.conformance.batches import FLOAT64, rollouts
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared
from composer_plugins.conformance.verl_claims import policy as claims
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.advantages import GAMMAS, claim, kernel, precision
from composer_plugins.conformance.verl_claims.token_advantages import (
    cut_to_a_power_of_two,
    for_whitening,
    per_token,
    whitened,
)
from composer_plugins.findings import ComposerWarning
from composer_plugins.frameworks.verl import VERL
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.draws import Draw
from parity_tests.rigs.verl_actor import algorithm, composer_actor
from parity_tests.rigs.verl_drawn import largest_term

GEO_MEAN = claims.DRAWN | {"clip_ratio_low": [0.01, 0.4], "clip_ratio_high": [0.01, 0.4]}

# Dialects of verl that its registries do not get from us, so that there is nothing to call.
BATCH = "a statistic of the whole batch, and verl passes micro-batches; the kernel: live/verl/test_conform.py"
KERNEL = "the kernel: live/verl/test_conform.py"
LEFT_OUT = {
    "clip_cov@verl": f"{BATCH}; it also draws tokens at random, each side its own",
    "kl_cov@verl": BATCH,
    "gdpo@verl": f"an estimator is handed the sum of the reward's components alone; {KERNEL}",
    "remax@verl": f"verl computes its baselines for its own estimator only; {KERNEL}",
    **{
        f"{name}@verl": f"verl hands sum_pi_squared to its own estimator only; {KERNEL}"
        for name in ("optimal_token_baseline", "tir_optimal_token_baseline")
    },
    "gae@verl": f"verl calls its own without asking the registry, and hands no other values; {KERNEL}",
}


def policy(theirs: str, row: str, options: claims.Options, draw: Draw) -> Iterator[Compared]:
    """A loss of both registries; options that are not drawn are those of our dialect."""
    batch, mode, info = claims.draw_case(draw)
    if theirs == "geo_mean":  # one mean over all rows, whatever is set
        mode, info = "seq-mean-token-mean", {"global_batch_size": len(batch.mask)}
        batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    drawn, name = claims.draw_options(draw, theirs, options), row.partition("@")[0]
    is_main_row = row == claims.ours(theirs).row
    numbers = claims.by_name(drawn if is_main_row else claims.numbers_of(name))
    config = upstream.actor(info, **numbers)
    own, own_gradient, own_metrics = upstream.policy_loss(theirs, batch, config, mode)
    config = composer_actor({"policy": row, "policy_params": claims.our_params(row, drawn)}, info)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # of a reduction that is not the loss's own
        loss, gradient, metrics = upstream.policy_loss(f"composer/{name}", batch, config, mode)
    forced = claims.ours(theirs).mode
    scale = largest_term(claims.our_kernel(row, drawn), batch, forced or mode, info)
    yield Compared(loss, own, batch.mask.numel(), scale)
    yield Compared(gradient, own_gradient, batch.mask.shape[1], what=GRADIENT)
    under_verls_names = {key for key in metrics if not key.startswith("actor/composer/")}
    assert under_verls_names == own_metrics.keys() | {"actor/ppo_kl"}  # verl's gpg logs nothing
    largest = max(1.0, float((batch.logprobs - batch.old_logprobs).abs().max()))
    for key, value in own_metrics.items():
        found, wanted = torch.tensor(metrics[key]), torch.tensor(value)
        yield Compared(found, wanted, batch.mask.numel(), largest, torch.float32, key)


def policies() -> list[Claim]:
    """Every policy loss that both registries have."""
    rows = [(name, claims.ours(name).row, claims.values_of(name)) for name in claims.LOSSES]
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
    params: dict[str, Any] = {}  # ours
    note: str = ""
    whitened: bool = False
    by_deviation: bool = True  # verl's norm_adv_by_std_in_grpo


EPS = 1e-6
ROUNDED = "groups of one too, where verl rounds 1 + eps to float32"
ESTIMATORS = [
    Estimator("grpo@verl", "grpo", eps=EPS),
    Estimator("grpo@verl", "grpo", 1, EPS, torch.float32, note=ROUNDED),
    Estimator("grpo@verl", "grpo_vectorized", 1, EPS, torch.float32, note="verl's is in float32"),
    Estimator("grpo@verl", "grpo", 1, by_deviation=False),
    Estimator("dr_grpo@verl", "grpo", 1, by_deviation=False),
    Estimator("rloo@verl", "rloo", 1),
    Estimator("rloo@verl", "rloo_vectorized", 1, params={"singleton": "zero"}),
    Estimator("opo@verl", "opo", 1),
    Estimator("gpg@verl", "gpg", 1, dtype=torch.float32, note="verl's alpha is a float32"),
    Estimator("pass_at_k@verl", "grpo_passk", eps=EPS),
    Estimator("pass_at_k@verl", "grpo_passk", by_deviation=False),
    Estimator("reinforce_pp@verl", "reinforce_plus_plus", whitened=True),
    Estimator("reinforce_pp_baseline@verl", "reinforce_plus_plus_baseline", whitened=True),
]


def advantage(row: Estimator, draw: Draw) -> Iterator[Compared]:
    """An estimator of both registries, on the same rollouts."""
    batch = rollouts(draw, row.min_group)
    if row.whitened:  # as many unmasked tokens as let verl whiten in float64
        batch, dtype = for_whitening(batch)
        batch = batch if dtype == FLOAT64 else cut_to_a_power_of_two(batch)
    switch = {"norm_adv_by_std_in_grpo": row.by_deviation}
    discount = {"gamma": draw.choose(GAMMAS, "gamma")} if row.theirs == "reinforce_plus_plus" else {}
    loss = find_one(row.ours, "advantage").loss
    params = row.params | VERL.parameters(loss, switch if not row.by_deviation else discount)
    config = algorithm(advantage=row.ours, advantage_params=params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # of rewards at masked tokens
        ours = upstream.advantages(f"composer/{row.ours.partition('@')[0]}", batch, config=config)
    theirs, returns = upstream.estimated(row.theirs, batch, config=algorithm(switch | discount), **switch)
    if row.whitened:
        largest, raw = float(batch.rewards.abs().max()), returns
        if "baseline" in row.ours:  # verl returns what is whitened already
            raw = per_token(kernel("dr_grpo@verl")(batch.rewards, batch.ids), batch)
        else:
            largest *= batch.mask.shape[1]
        assert not ours[~batch.mask].any()
        yield whitened(ours, theirs, raw, batch.mask, largest, FLOAT64)
        return
    # Where the mask is False verl may leave something, and 0 / 0 in a group without an unmasked token.
    theirs = torch.where(batch.mask, theirs, 0.0)
    alpha = len(batch.rewards) / max(1, int(batch.rewards.count_nonzero()))  # gpg's
    for group in batch.ids.unique():
        rows = batch.ids == group
        scale = precision(batch, rows, row.eps)
        scale = {"gpg": alpha * scale}.get(row.theirs, scale)
        yield Compared(ours[rows], theirs[rows], 2 * len(batch.ids), scale, row.dtype)


def advantages() -> list[Claim]:
    """Every estimator that both registries have."""
    return [claim(row.ours, row.theirs, partial(advantage, row), row.note) for row in ESTIMATORS]
