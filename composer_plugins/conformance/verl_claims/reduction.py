"""verl's aggregation modes, KL estimators and rollout corrections."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config.actor import RolloutCorrectionConfig

from composer_plugins.conformance import reductions
from composer_plugins.conformance.batches import Batch, global_batch, policy_batch
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.policy import draw_case, parity
from composer_plugins.frameworks.verl import CHOOSES, KL_ESTIMATORS, VERL
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.draws import Draw, assume, flag
from composer_plugins.testing.inputs import with_junk

AGGREGATION, KL, CORRECTION = "aggregation modes", "KL estimators", "rollout corrections"

# Of a row's statistic, bounds on either side; bounds on one side alone have no kernel here.
REJECTIONS = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}
BOUNDS = [None, (2.0,), (1.1,), (10.0,), (0.5, 5.0), (0.9, 1.1), (0.01, 2.0)]


def mode(name: str, draw: Draw) -> Iterator[Compared]:
    """An aggregation mode, with the counts of a part of a batch or without."""
    batch = policy_batch(draw)
    token_loss = (batch.logprobs * batch.advantages).requires_grad_()
    info = global_batch(draw, batch.mask)
    theirs = agg_loss(token_loss, batch.mask.long(), name, **info)
    (want,) = torch.autograd.grad(theirs, token_loss)
    junk = with_junk(token_loss.detach(), batch.mask).requires_grad_()
    ours = reductions.verl(junk, batch.mask, VERL.denominators[name], info)
    (gradient,) = torch.autograd.grad(ours, junk)
    largest = float((gradient * token_loss.detach()).abs().max())
    yield Compared(ours, theirs, token_loss.numel(), largest)
    yield Compared(gradient, want, 1, what=GRADIENT)


def estimator(name: str, draw: Draw) -> Iterator[Compared]:
    """A KL estimator, and its gradient in the policy."""
    batch = policy_batch(draw)
    x = batch.logprobs.clone().requires_grad_()
    theirs = torch.where(batch.mask, kl_penalty(x, batch.old_logprobs, name), 0.0)
    yield from kl_compared(name, theirs, x, batch.old_logprobs, batch.mask)


def kl_compared(name: str, theirs: Tensor, x: Tensor, others: Tensor, mask: Tensor) -> Iterator[Compared]:
    """Our row of verl's estimator, with verl's estimates of the log-probabilities `x` and the others'."""
    (want,) = torch.autograd.grad(theirs.sum(), x)
    junk = with_junk(x.detach(), mask).requires_grad_()
    ours = kernel("kl", VERL.row_of(**{CHOOSES["kl"]: name}) or "")(junk, with_junk(others, mask), mask)
    (gradient,) = torch.autograd.grad(ours.sum(), junk)
    # Of k3 the terms are exp(-d), d and 1: where d is small it is their difference that is left.
    largest = max(1.0, float(theirs.detach().abs().max()), float(want.abs().max()))
    yield Compared(ours, theirs, 3, largest)
    yield Compared(gradient, want, 3, largest, what=GRADIENT)


def weights(batch: Batch, level: str, bounds: tuple[float, ...] | None, normalise: bool) -> Tensor:
    """Our correction: one bound caps, two mask; None is each side's own default."""
    given = with_junk(batch.logprobs, batch.mask), with_junk(batch.old_logprobs, batch.mask), batch.mask
    name, params = "tis@verl", dict[str, Any](level=level)
    if bounds is not None and len(bounds) == 2:
        params |= {"low": bounds[0], "high": bounds[1]}
        name = "icepop@verl" if level == "token" else "mis"
        params |= {"log_ratio_clamp": 20.0} if name == "mis" else {}
        if level == "token":
            del params["level"]
    elif bounds is not None:
        params["cap"] = bounds[0]
    found: Tensor = kernel("correction", name, normalise=normalise, **params)(*given)
    return found


def mean_weight(w: Tensor, mask: Tensor, level: str) -> Tensor:
    """By what verl normalises, if it is above 1e-8: the mean over tokens, or over rows."""
    return aggregate(w, mask, "token-mean" if level == "token" else "seq-mean-token-mean")


def draw_weights(
    draw: Draw, batch: Batch, bounds: list[Any], level: str = ""
) -> tuple[Tensor, dict[str, Any]]:
    """Our weights, and verl's options; where verl neither raises nor leaves out the normalisation."""
    level, normalise = level or draw.choose(["token", "sequence"], "level"), flag(draw, "normalise")
    chosen = draw.choose(bounds, "bounds")
    ours = weights(batch, level, chosen, normalise)
    assume(bool(ours.any()))
    if normalise:
        assume(float(mean_weight(weights(batch, level, chosen, False), batch.mask, level)) > 1e-8)
    option: dict[str, Any] = {"rollout_is": level, "rollout_is_batch_normalize": normalise}
    if chosen is not None:
        option["rollout_is_threshold"] = "_".join(map(str, chosen))
    return ours, option


def correction(bounds: list[Any], level: str, draw: Draw) -> Iterator[Compared]:
    """Truncated, or masked, importance weights."""
    batch = policy_batch(draw)
    ours, option = draw_weights(draw, batch, bounds, level)
    log_ratios = batch.logprobs - batch.old_logprobs
    theirs, _ = compute_rollout_correction_weights(log_ratios, batch.mask.long(), **option)
    # A sum of log ratios is as precise as its largest, and exp hands that on.
    largest = max(1.0, float(log_ratios.abs().max()))
    yield Compared(ours, theirs, batch.mask.numel(), largest * max(1.0, float(theirs.max())))


def kept(batch: Batch, option: str, low: float, high: float) -> Tensor:
    """verl bounds -log w between the logarithms of its thresholds: w lies between their inverses.

    It clamps each log ratio at 20 nats before it sums them, ours the sum: here they are clamped before.
    """
    clamped = (batch.logprobs - batch.old_logprobs).clamp(-20, 20)
    given = with_junk(clamped, batch.mask), torch.zeros_like(clamped), batch.mask
    params = {"low": 1 / high, "high": 1 / low, "level": REJECTIONS[option]}
    found: Tensor = kernel("correction", "mis", **params)(*given) > 0
    return found


def rejection(option: str, draw: Draw) -> Iterator[Compared]:
    """Which tokens a masked correction keeps."""
    batch, bounds = policy_batch(draw), draw.choose([(0.5, 2.0), (0.999, 1.001), (0.9, 5.0)], "bounds")
    log_ratios, threshold = batch.logprobs - batch.old_logprobs, "_".join(map(str, bounds))
    theirs, _ = compute_rollout_rejection_mask(log_ratios, batch.mask.long(), option, threshold)
    yield Compared(kept(batch, option, *bounds).double(), theirs.double(), 1, 0.0)


def bypass(reinforce: bool, draw: Draw) -> Iterator[Compared]:
    """The old policy is the rollout's, and PPO's ratio the correction; or REINFORCE with weights."""
    batch, mode, info = draw_case(draw)
    batch = batch._replace(weights=None)
    option = draw.choose([None, *REJECTIONS], "rejection")
    options: dict[str, Any] = {"rollout_rs": option, "rollout_rs_threshold": "0.5_2.0"}
    w = torch.ones(())
    if reinforce:
        w, more = draw_weights(draw, batch, BOUNDS[1:])
        options |= more | {"loss_type": "reinforce"}
    left = batch.mask if option is None else kept(batch, option, 0.5, 2.0)
    assume(bool(left.any()))
    config = upstream.actor(info, rollout_correction=RolloutCorrectionConfig(**options))
    loss, gradient, _ = upstream.policy_loss("bypass_mode", batch, config, mode)
    row = kernel("policy", "reinforce" if reinforce else "grpo@verl")

    def weighted(logprobs: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return corrected(row(logprobs, advantages, mask), w, mask)

    ours: Callable[..., Any] = weighted if reinforce else row
    yield from parity(ours, batch._replace(mask=left), (loss, gradient), mode, info)[1]


CAPS, RANGES = [one for one in BOUNDS if not one or len(one) == 1], [one for one in BOUNDS if one and one[1:]]
CLAIMS = [
    *(
        Claim("aggregation", f"{ours}@verl", name, Place(AGGREGATION, {"name": name}), partial(mode, name))
        for name, ours in VERL.denominators.items()
    ),
    *(
        Claim("kl", row, name, Place(KL, {"name": name}), partial(estimator, name))
        for name, row in KL_ESTIMATORS.items()
    ),
    *(
        Claim("correction", row, f"rollout_is, {what}", Place(CORRECTION), partial(correction, bounds, level))
        for row, what, bounds, level in (
            ("tis@verl", "one threshold", CAPS, ""),
            ("icepop@verl", "two thresholds, token", RANGES, "token"),
            ("mis", "two thresholds, sequence", RANGES, "sequence"),
        )
    ),
    *(
        Claim(
            *("correction", "mis", f"rollout_rs {name}", Place(CORRECTION, {"name": name})),
            *(partial(rejection, name), "which tokens are kept"),
        )
        for name in REJECTIONS
    ),
    *(
        Claim(
            *("policy", row, f"bypass_mode, {what}", Place("policy losses", {"name": "bypass_mode"})),
            *(partial(bypass, reinforce), "with rollout_rs"),
        )
        for row, what, reinforce in (("reinforce", "reinforce", True), ("grpo@verl", "ppo_clip", False))
    ),
]
