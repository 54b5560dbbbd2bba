"""verl's policy losses: value, gradient, and the fraction that it logs as clipped.

A kernel is called through its catalogue row, "grpo@verl", so that the row's numbers are compared too: half
of the draws leave verl at its defaults and us at the row's.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.conformance.batches import FLOAT64, Batch, global_batch, policy_batch
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.frameworks.contract import NamedLoss, parameters_of
from composer_plugins.frameworks.verl import CHOOSES, VERL
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind
from composer_plugins.testing.draws import Draw, assume, flag
from composer_plugins.testing.inputs import with_junk

POLICY = "policy losses"  # the registry
CLIPPED = ("frac_low", "frac_high")  # our metrics that verl adds up as its clip fraction
Options = dict[str, list[float]]  # of verl's, by key below the actor's table, and values to draw
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
# The values to draw for each option that verl's policy losses read, which is at most the table's.
DRAWN: Options = {
    "clip_ratio_low": [3e-4, 0.1, 0.2, 0.9],
    "clip_ratio_high": [4e-4, 0.28, 3.0],
    "clip_ratio_c": [1.5, 3.0, 10.0, 1e4],
    "tau_pos": [0.5, 1.0, 2.0],
    "tau_neg": [0.5, 1.05, 4.0],
    "policy_loss.dro_beta": [1e-3, 0.05, 1.0],
    "policy_loss.clip_cov_ratio": [2e-4, 0.1, 0.5],
    "policy_loss.clip_cov_lb": [0.0, 0.1, 1.0],
    "policy_loss.clip_cov_ub": [0.5, 5.0, 1e3],
    "policy_loss.kl_cov_ratio": [2e-4, 0.1, 0.5],
    "policy_loss.ppo_kl_coef": [0.0, 0.1, 1.0],
}
# Of the losses whose bounds are not distances of a ratio from 1.
MOVES: Options = {"clip_ratio_low": [0.01, 0.2, 0.9], "clip_ratio_high": [0.01, 0.15, 1.0]}
LOGS: Options = {"clip_ratio_low": [0.01, 0.4, 3.0], "clip_ratio_high": [0.01, 0.4, 3.0]}
BOUNDS = {"dppo_tv": MOVES, "dppo_kl": MOVES, "geo_mean": LOGS}
# Rows that are verl's vanilla at other numbers.
VANILLA = {
    loss.name: dialect.params
    for loss in of_kind(losses(), "policy").values()
    for dialect in loss.dialects
    if dialect.upstream == "verl" and dialect.source.endswith("compute_policy_loss_vanilla")
}
ALONE = ("geo_mean", "clip_cov", "kl_cov")  # each is compared by a function of its own
LOSSES = [
    str(one.options[CHOOSES["policy"]])
    for one in VERL.losses
    if one.kind == "policy" and one.options[CHOOSES["policy"]] not in ALONE
]
NOT_COMPARED = {"bypass_mode": "it is vanilla or REINFORCE with a rollout correction, and these are compared"}


def ours(name: str) -> NamedLoss:
    """The row of verl's loss of this name."""
    (found,) = [one for one in VERL.losses if one.options == {CHOOSES["policy"]: name}]
    return found


def values_of(name: str) -> Options:
    """The values to draw for a loss. It is called with all options, and must not read another's."""
    return DRAWN | BOUNDS.get(name, {})


def draw_options(draw: Draw, name: str, options: Options) -> dict[str, float]:
    """verl's defaults, or every option drawn; always drawn if the loss has a parameter without a default."""
    chosen = find_one(ours(name).row, "policy")
    required = REQUIRED in {**chosen.loss.defaults, **chosen.params}.values()
    if not required and flag(draw, "defaults"):
        return {}
    return {key: draw.choose(values, key.rpartition(".")[2]) for key, values in options.items()}


def by_name(drawn: Mapping[str, float]) -> dict[str, float]:
    """verl's options without the tables in which they stand."""
    return {key.rpartition(".")[2]: value for key, value in drawn.items()}


def our_params(row: str, drawn: Mapping[str, float]) -> dict[str, Any]:
    """verl's options as parameters of our losses."""
    return VERL.parameters(find_one(row, "policy").loss, drawn)


def our_kernel(row: str, drawn: Mapping[str, float]) -> Kernel:
    """Our kernel with verl's options, called with the old log-probabilities whether it needs them or not."""
    found, needs = kernel("policy", row, **our_params(row, drawn)), find_one(row, "policy").loss.needs
    has_old = "old_logprobs" in needs or "rollout_logprobs" in needs
    return found if has_old else lambda logprobs, _, *others: found(logprobs, *others)


def parity(
    kernel: Callable[..., Any], batch: Batch, theirs: tuple[Tensor, Tensor], mode: str, info: dict[str, Any]
) -> tuple[Any, list[Compared]]:
    """Our kernel, reduced as verl reduces in `mode`, with verl's loss and gradient.

    Ours gets junk wherever the mask is False. The loss is a sum over tokens that may cancel, so the
    magnitude is its largest term and not the sum.
    """
    mask = batch.mask
    logprobs = with_junk(batch.logprobs, mask).requires_grad_()
    found = kernel(logprobs, with_junk(batch.old_logprobs, mask), with_junk(batch.advantages, mask), mask)
    token_loss = found.loss if batch.weights is None else found.loss * batch.weights
    loss = reductions.verl(token_loss, mask, VERL.denominators[mode], info)
    share, gradient = torch.autograd.grad(loss, [token_loss, logprobs])
    largest = float((share * token_loss.detach()).abs().max())
    return found, [
        Compared(loss, theirs[0], token_loss.numel(), largest),
        Compared(gradient, theirs[1], token_loss.shape[-1], what=GRADIENT),
    ]


def draw_case(draw: Draw) -> tuple[Batch, str, dict[str, Any]]:
    """A batch, an aggregation mode and the counts of the whole batch."""
    batch = policy_batch(draw)
    return batch, draw.choose(upstream.modes(), "mode"), global_batch(draw, batch.mask)


def beside_verls(
    name: str, batch: Batch, mode: str, info: dict[str, Any], drawn: Mapping[str, float], **more: Tensor
) -> tuple[Any, list[Compared], dict[str, float]]:
    """What `parity` returns for verl's loss of this name with its options, and what verl logs."""
    loss, gradient, logged = upstream.policy_loss(name, batch, upstream.actor(info, **by_name(drawn)), mode)
    row = ours(name)
    found = partial(our_kernel(row.row, drawn), **more)
    return *parity(found, batch, (loss, gradient), row.mode or mode, info), logged


def compare(name: str, draw: Draw) -> Iterator[Compared]:
    """A loss of the registry, with verl's options or its defaults, in every mode."""
    batch, mode, info = draw_case(draw)
    drawn = draw_options(draw, name, values_of(name))
    found, compared, logged = beside_verls(name, batch, mode, info, drawn)
    yield from compared
    counted = [one.value.double() for key, one in found.metrics.items() if key.endswith(CLIPPED)]
    if counted:
        fraction = torch.stack([aggregate(one, batch.mask, "token-mean") for one in counted]).sum()
        theirs = torch.tensor(logged["actor/pg_clipfrac"])
        yield Compared(fraction, theirs, 1, 1.0, torch.float32, "pg_clipfrac")


def vanilla(name: str, draw: Draw) -> Iterator[Compared]:
    """A row that is verl's vanilla at the numbers of its dialect."""
    batch, mode, info = draw_case(draw)
    drawn = numbers_of(name)
    loss, gradient, _ = upstream.policy_loss("vanilla", batch, upstream.actor(info, **by_name(drawn)), mode)
    yield from parity(kernel("policy", f"{name}@verl"), batch, (loss, gradient), mode, info)[1]


def numbers_of(name: str) -> dict[str, Any]:
    """The options of verl's vanilla at which it is this row."""
    loss, params = find_one(name, "policy").loss, VANILLA[name]
    set_by = {one.key: parameters_of(one.sets, loss) for one in VERL.options_of("policy")}
    return {
        key: conversion.theirs(params[parameter])
        for key, sets in set_by.items()
        for parameter, conversion in sets.items()
        if parameter in params
    }


def geo_mean(draw: Draw) -> Iterator[Compared]:
    """It takes the mean over rows, the empty ones too, whatever mode and counts it is given."""
    batch = policy_batch(draw)
    batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    row, drawn = ours("geo_mean"), draw_options(draw, "geo_mean", values_of("geo_mean"))
    config = upstream.actor(None, **by_name(drawn))
    loss, gradient, _ = upstream.policy_loss("geo_mean", batch, config, "token-mean")
    if batch.weights is not None:  # and of the weights their geometric mean
        log_weights = torch.where(batch.mask, (batch.weights + 1e-10).log(), 0.0).sum(-1, keepdim=True)
        mean = log_weights / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        batch = batch._replace(weights=mean.exp().expand(batch.mask.shape))
    info = {"global_batch_size": len(batch.mask)}
    yield from parity(our_kernel(row.row, drawn), batch, (loss, gradient), row.mode, info)[1]


def clip_cov(draw: Draw) -> Iterator[Compared]:
    """Both draw the first tokens instead of random ones."""
    batch, mode, info = draw_case(draw)
    drawn = draw_options(draw, "clip_cov", DRAWN)
    uniform = torch.linspace(0, 0.99, batch.mask.numel(), dtype=FLOAT64).view(batch.mask.shape)
    with mock.patch("torch.randperm", torch.arange):
        yield from beside_verls("clip_cov", batch, mode, info, drawn, uniform=uniform)[1]


def kl_cov(draw: Draw) -> Iterator[Compared]:
    """Where the tokens of highest covariance are the same by any arithmetic: torch.topk breaks ties."""
    batch, mode, info = draw_case(draw)
    drawn = draw_options(draw, "kl_cov", DRAWN)
    advantages, log_p = batch.advantages[batch.mask], batch.logprobs[batch.mask]
    covariance = ((advantages - advantages.mean()) * (log_p - log_p.mean())).sort(descending=True).values
    count = max(1, int(drawn.get("policy_loss.kl_cov_ratio", 2e-4) * len(covariance)))
    assume(count == len(covariance) or bool(covariance[count - 1] - covariance[count] > 1e-9))
    yield from beside_verls("kl_cov", batch, mode, info, drawn)[1]


def policy_claim(row: str, theirs: str, compare: Any, note: str = "") -> Claim:
    """About one policy loss of the registry."""
    return Claim("policy", row, theirs, Place(POLICY, {"name": theirs}), compare, note)


CLAIMS = [
    *(
        policy_claim(row.row, name, partial(compare, name), f"always {row.mode}" if row.mode else "")
        for name in LOSSES
        for row in (ours(name),)
    ),
    *(
        policy_claim(f"{name}@verl", "vanilla", partial(vanilla, name), "at the numbers of the dialect")
        for name in VANILLA
        if name != "grpo"
    ),
    policy_claim(ours("geo_mean").row, "geo_mean", geo_mean, "a mean over all rows, whatever the mode"),
    policy_claim(ours("clip_cov").row, "clip_cov", clip_cov, "with the same random tokens on both sides"),
    policy_claim(ours("kl_cov").row, "kl_cov", kl_cov),
]
