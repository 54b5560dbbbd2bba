"""Our losses in verl's registries beside verl's own: the claims of `conform`, through the adapter."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.conformance.batches import Batch, Rollouts
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared
from composer_plugins.conformance.verl_claims import policy as claims
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.advantages import claims_of
from composer_plugins.conformance.verl_claims.token_advantages import whitened_claims
from composer_plugins.errors import ComposerWarning
from composer_plugins.testing.draws import Draw
from parity_tests.rigs.verl_actor import algorithm, composer_actor

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


def largest_term(kernel: Callable[..., Any], batch: Batch, mode: str, info: dict[str, Any]) -> float:
    """What the largest token adds to the reduced loss: the scale of a sum, which itself may cancel."""
    terms = kernel(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask).loss.detach()
    terms = (terms if batch.weights is None else terms * batch.weights).requires_grad_()
    (share,) = torch.autograd.grad(reductions.verl(terms, batch.mask, mode, info), terms)
    return float((share * terms.detach()).abs().max())


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


def estimator(row: str, batch: Rollouts, **params: Any) -> Tensor:
    """Our registered estimator's advantages, with this row and these parameters in our table."""
    config = algorithm(advantage=row, advantage_params=params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # of rewards at masked tokens, and groups of one
        found = upstream.advantages(f"composer/{row.partition('@')[0]}", batch, config=config)
    assert not found[~batch.mask].any()
    return found


def advantages() -> list[Claim]:
    """Every estimator that both registries have."""
    return claims_of(estimator) + whitened_claims(estimator)
