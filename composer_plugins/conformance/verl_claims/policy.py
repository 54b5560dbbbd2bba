"""verl's policy losses: value, gradient, and the fraction that it logs as clipped.

A kernel is called through its catalogue row, "grpo@verl", so that the row's numbers are compared too: half
of the draws leave verl at its defaults and us at the row's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.batches import FLOAT64, Batch, global_batch, policy_batch
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind
from composer_plugins.testing.draws import Draw, assume, flag
from composer_plugins.testing.inputs import with_junk

POLICY = "policy losses"  # the registry
Options = dict[str, list[float]]
CLIPS: Options = {"clip_ratio_low": [3e-4, 0.1, 0.2, 0.9], "clip_ratio_high": [4e-4, 0.28, 3.0]}
CAPS: Options = {"clip_ratio_c": [1.5, 3.0, 10.0, 1e4]}
MOVES: Options = {"clip_ratio_low": [0.01, 0.2, 0.9], "clip_ratio_high": [0.01, 0.15, 1.0]}
TAUS: Options = {"tau_pos": [0.5, 1.0, 2.0], "tau_neg": [0.5, 1.05, 4.0]}
COVARIANCE: Options = {
    "clip_cov_ratio": [2e-4, 0.1, 0.5],
    "clip_cov_lb": [0.0, 0.1, 1.0],
    "clip_cov_ub": [0.5, 5.0, 1e3],
}


class Row(NamedTuple):
    """One of verl's losses in our terms."""

    ours: str
    options: Options = {}  # verl's, and values to draw
    keywords: tuple[str, ...] = ()  # ours, in the same order
    clipped: tuple[str, ...] = ()  # our metrics that verl adds up as its clip fraction
    needs_old: bool = True
    required: bool = False  # verl has no default
    mode: str | None = None  # verl reduces in this mode, whatever is configured


CLIP = ("clip_low", "clip_high")  # parameters; the next two are metrics
CLIPPED, MASKED = ("clip_frac_low", "clip_frac_high"), ("mask_frac_low", "mask_frac_high")
ROWS = {
    "vanilla": Row("grpo@verl", CLIPS | CAPS, (*CLIP, "dual_clip"), CLIPPED),
    "gspo": Row("gspo_token@verl", CLIPS, CLIP, CLIPPED),
    "sapo": Row("sapo@verl", TAUS, ("tau_pos", "tau_neg"), mode="seq-mean-token-mean"),
    "gpg": Row("gpg@verl", needs_old=False),
    "cispo": Row("cispo@verl", CLIPS, CLIP, CLIPPED),
    "dppo_tv": Row("dppo_tv@verl", MOVES | CAPS, ("tv_low", "tv_high", "ratio_cap"), MASKED),
    "dppo_kl": Row("dppo_kl@verl", MOVES | CAPS, ("kl_low", "kl_high", "ratio_cap"), MASKED),
    "dro": Row("dro", {"dro_beta": [1e-3, 0.05, 1.0]}, ("beta",), required=True),
}
# Rows that are verl's vanilla at other numbers.
VANILLA = {
    loss.name: dialect.params
    for loss in of_kind(losses(), "policy").values()
    for dialect in loss.dialects
    if dialect.upstream == "verl" and dialect.source.endswith("compute_policy_loss_vanilla")
}
NOT_COMPARED = {"bypass_mode": "it is vanilla or REINFORCE with a rollout correction, and these are compared"}


def draw_options(draw: Draw, options: Options, *, required: bool = False) -> dict[str, float]:
    """verl's defaults, or every option drawn."""
    if not required and flag(draw, "defaults"):
        return {}
    return {name: draw.choose(values, name) for name, values in options.items()}


def in_our_words(drawn: dict[str, float], options: Options, keywords: tuple[str, ...]) -> dict[str, float]:
    """verl's options under the names of our parameters."""
    return {ours: drawn[theirs] for ours, theirs in zip(keywords, options, strict=True) if theirs in drawn}


def parity(
    kernel: Callable[..., Any], batch: Batch, theirs: tuple[Tensor, Tensor], mode: str, info: dict[str, Any]
) -> tuple[Any, list[Compared]]:
    """Our kernel, reduced, with verl's loss and gradient; ours gets junk wherever the mask is False.

    The loss is a sum over tokens that may cancel, so the magnitude is its largest term and not the sum.
    """
    mask = batch.mask
    logprobs = with_junk(batch.logprobs, mask).requires_grad_()
    ours = kernel(logprobs, with_junk(batch.old_logprobs, mask), with_junk(batch.advantages, mask), mask)
    token_loss = ours.loss if batch.weights is None else ours.loss * batch.weights
    loss = reductions.verl(token_loss, mask, mode, info)
    share, gradient = torch.autograd.grad(loss, [token_loss, logprobs])
    largest = float((share * token_loss.detach()).abs().max())
    return ours, [
        Compared(loss, theirs[0], token_loss.numel(), largest),
        Compared(gradient, theirs[1], token_loss.shape[-1], what=GRADIENT),
    ]


def draw_case(draw: Draw) -> tuple[Batch, str, dict[str, Any]]:
    """A batch, an aggregation mode and the counts of the whole batch."""
    batch = policy_batch(draw)
    return batch, draw.choose(upstream.modes(), "mode"), global_batch(draw, batch.mask)


def compare(name: str, draw: Draw) -> Iterator[Compared]:
    """A loss of the registry, with verl's options or its defaults, in every mode."""
    row = ROWS[name]
    batch, mode, info = draw_case(draw)
    drawn = draw_options(draw, row.options, required=row.required)
    loss, gradient, metrics = upstream.policy_loss(name, batch, upstream.actor(info, **drawn), mode)
    ours_of = kernel("policy", row.ours, **in_our_words(drawn, row.options, row.keywords))

    def call(logprobs: Tensor, old_logprobs: Tensor, *others: Tensor) -> Any:
        return ours_of(logprobs, old_logprobs, *others) if row.needs_old else ours_of(logprobs, *others)

    ours, compared = parity(call, batch, (loss, gradient), row.mode or mode, info)
    yield from compared
    if row.clipped:
        counted = [ours.metrics[m].value.double() for m in row.clipped]
        fraction = torch.stack([aggregate(one, batch.mask, "token-mean") for one in counted]).sum()
        logged = torch.tensor(metrics["actor/pg_clipfrac"])
        yield Compared(fraction, logged, 1, 1.0, torch.float32, "pg_clipfrac")


def vanilla(name: str, draw: Draw) -> Iterator[Compared]:
    """A row that is verl's vanilla at the numbers of its dialect."""
    batch, mode, info = draw_case(draw)
    params = VANILLA[name]
    numbers: dict[str, Any] = {
        "clip_ratio_low": params["clip_low"],
        "clip_ratio_high": params["clip_high"],
        "clip_ratio_c": params["dual_clip"],
    }
    loss, gradient, _ = upstream.policy_loss("vanilla", batch, upstream.actor(info, **numbers), mode)
    yield from parity(kernel("policy", f"{name}@verl"), batch, (loss, gradient), mode, info)[1]


def geo_mean(draw: Draw) -> Iterator[Compared]:
    """It takes the mean over rows, the empty ones too, whatever mode and counts it is given."""
    batch = policy_batch(draw)
    batch = batch._replace(advantages=batch.advantages[:, :1].expand(batch.mask.shape))
    options: Options = {"clip_ratio_low": [0.01, 0.4, 3.0], "clip_ratio_high": [0.01, 0.4, 3.0]}
    drawn = draw_options(draw, options)
    loss, gradient, _ = upstream.policy_loss("geo_mean", batch, upstream.actor(None, **drawn), "token-mean")
    if batch.weights is not None:  # and of the weights their geometric mean
        log_weights = torch.where(batch.mask, (batch.weights + 1e-10).log(), 0.0).sum(-1, keepdim=True)
        mean = log_weights / batch.mask.sum(-1, keepdim=True).clamp(min=1)
        batch = batch._replace(weights=mean.exp().expand(batch.mask.shape))
    ours = kernel("policy", "gmpo@verl", **in_our_words(drawn, options, CLIP))
    info = {"global_batch_size": len(batch.mask)}
    yield from parity(ours, batch, (loss, gradient), "seq-mean-token-mean", info)[1]


def clip_cov(draw: Draw) -> Iterator[Compared]:
    """Both draw the first tokens instead of random ones."""
    batch, mode, info = draw_case(draw)
    options = COVARIANCE | CLIPS
    drawn = draw_options(draw, options)
    with mock.patch("torch.randperm", torch.arange):
        loss, gradient, _ = upstream.policy_loss("clip_cov", batch, upstream.actor(info, **drawn), mode)
    keywords = ("cov_ratio", "cov_low", "cov_high", *CLIP)
    uniform = torch.linspace(0, 0.99, batch.mask.numel(), dtype=FLOAT64).view(batch.mask.shape)
    ours = kernel("policy", "clip_cov@verl", **in_our_words(drawn, options, keywords))
    yield from parity(partial(ours, uniform=uniform), batch, (loss, gradient), mode, info)[1]


def kl_cov(draw: Draw) -> Iterator[Compared]:
    """Where the tokens of highest covariance are the same by any arithmetic: torch.topk breaks ties."""
    batch, mode, info = draw_case(draw)
    options: Options = {"kl_cov_ratio": [2e-4, 0.1, 0.5], "ppo_kl_coef": [0.0, 0.1, 1.0]}
    drawn = draw_options(draw, options)
    advantages, log_p = batch.advantages[batch.mask], batch.logprobs[batch.mask]
    covariance = ((advantages - advantages.mean()) * (log_p - log_p.mean())).sort(descending=True).values
    count = max(1, int(drawn.get("kl_cov_ratio", 2e-4) * len(covariance)))
    assume(count == len(covariance) or bool(covariance[count - 1] - covariance[count] > 1e-9))
    loss, gradient, _ = upstream.policy_loss("kl_cov", batch, upstream.actor(info, **drawn), mode)
    ours = kernel("policy", "kl_cov@verl", **in_our_words(drawn, options, ("cov_ratio", "kl_coef")))
    yield from parity(ours, batch, (loss, gradient), mode, info)[1]


def policy_claim(ours: str, theirs: str, compare: Any, note: str = "") -> Claim:
    """About one policy loss of the registry."""
    return Claim("policy", ours, theirs, Place(POLICY, {"name": theirs}), compare, note)


CLAIMS = [
    *(
        policy_claim(row.ours, name, partial(compare, name), f"always {row.mode}" if row.mode else "")
        for name, row in ROWS.items()
    ),
    *(
        policy_claim(f"{name}@verl", "vanilla", partial(vanilla, name), "at the numbers of the dialect")
        for name in VANILLA
        if name != "grpo"
    ),
    policy_claim("gmpo@verl", "geo_mean", geo_mean, "a mean over all rows, whatever the mode"),
    policy_claim("clip_cov@verl", "clip_cov", clip_cov, "with the same random tokens on both sides"),
    policy_claim("kl_cov@verl", "kl_cov", kl_cov),
]
