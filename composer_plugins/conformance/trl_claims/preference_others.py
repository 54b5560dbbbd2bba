"""Preference losses of the trainers CPO, ORPO, KTO and TPO."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.claims import GRADIENT, Compared
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream_pairs
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.conformance.trl_claims.preference import draw_pairs, parity
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.preference import kto_reference_point, sequence_logprobs
from composer_plugins.testing.assertions import largest_number
from composer_plugins.testing.draws import Draw, assume, generator

GAMMAS, ALPHAS = [0.0, 0.5, 1.4], [0.0, 0.25, -0.5]


def cpo(
    loss_type: str,
    row: str,
    draw: Draw,
    *,
    average: bool = False,
    with_nll: bool = True,
    with_alpha: bool = False,
    **ours: Any,
) -> Iterator[Compared]:
    """A `loss_type`, with its likelihood of the chosen if our row has one. CPOConfig's alpha is AlphaPO's."""
    d = replace(draw_pairs(draw), ld_alpha=None)
    nll_weight = draw.choose([0.0, 0.7], "cpo_alpha") if with_nll else 0.0
    gamma = draw.choose(GAMMAS, "simpo_gamma") if loss_type == "simpo" else 0.5
    alpha = draw.choose(ALPHAS, "alpha") if with_alpha else 0.0
    theirs = upstream_pairs.batch_loss(
        "CPOTrainer",
        d.scores(average)[:2],
        d.nll().mean(),
        loss_type=loss_type,
        beta=d.beta,
        simpo_gamma=gamma,
        label_smoothing=d.label_smoothing,
        alpha=alpha,
        cpo_alpha=nll_weight,
    )
    keywords = {"beta": d.beta, "label_smoothing": d.label_smoothing} | ours
    inputs = d.scores(average)[:2]
    if with_nll:
        inputs, keywords = [*inputs, d.nll()], keywords | {"nll_weight": nll_weight}
    if loss_type == "simpo":
        keywords["gamma_beta_ratio"] = gamma / d.beta
    if with_alpha:
        keywords["alpha"] = alpha
    pair = kernel("preference", row)(*inputs, **keywords)
    steepest = float(d.policy.detach().abs().max()) * abs(alpha)
    yield from parity(pair.loss.mean(), theirs, d, d.beta * math.exp(steepest) / d.mask.shape[1])


def orpo(draw: Draw) -> Iterator[Compared]:
    """TRL takes the odds in float32."""
    d = draw_pairs(draw)
    assume(bool(d.mask.any(-1).all()))
    scores = d.scores(average=True)[:2]
    theirs = upstream_pairs.batch_loss("ORPOTrainer", scores, d.nll().mean(), beta=d.beta)
    ours = kernel("preference", "orpo@trl")(*d.scores(average=True)[:2], d.nll(), beta=d.beta).loss.mean()
    yield from parity(ours, theirs, d, dtype=torch.float32)


def kto(loss_type: str, row: str, draw: Draw) -> Iterator[Compared]:
    """The reference point is of other completions, and 0 where its mean is negative."""
    d = replace(draw_pairs(draw), ld_alpha=None)
    labels, weight = draw.choose(["mixed", "good", "bad"], "labels"), draw.choose([1.0, 0.3], "weight")
    drift = draw.number(-3, 3, "drift")
    scores, reference = d.score(d.policy), d.score(d.reference)
    mismatched = torch.linspace(drift, 2 * drift, len(scores), dtype=torch.float64)
    third = torch.arange(len(scores)) % 3
    desirable = {"mixed": third < 2, "good": third < 3, "bad": third < 0}[labels]
    weights: dict[str, Any] = {"desirable_weight": weight, "undesirable_weight": 1.3}
    no_drift = torch.zeros_like(mismatched)
    trainer = upstream_pairs.pair_trainer(
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: mismatched,
        beta=d.beta,
        **weights,
    )
    batch = {"label": desirable, "ref_logps": reference, "ref_KL_logps": no_drift}
    batch |= upstream_pairs.completions(d.mask)
    theirs = upstream_pairs.computed("KTOTrainer", trainer, upstream_pairs.outputs(d.policy), batch)
    inputs = [scores, reference, desirable]
    if loss_type == "kto":
        inputs.append(kto_reference_point(mismatched, no_drift))
    pair = kernel("preference", row)(*inputs, beta=d.beta, **weights)
    yield from parity(pair.loss.mean(), theirs, d)


def draw_triples(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, token ids and mask of [chosen; rejected; gold]; the gold ones have a token at least."""
    g = generator(draw)
    rows, width, vocab = (draw.integer(low, high) for low, high in ((1, 3), (1, 5), (2, 6)))
    logits = 3 * torch.randn(3 * rows, width + 1, vocab, generator=g, dtype=torch.float64)
    ids = torch.randint(0, vocab, (3 * rows, width + 1), generator=g)
    mask = torch.rand(3 * rows, width, generator=g) < 0.7
    mask[-1, 0] = True
    return logits.requires_grad_(), ids, mask


def tpo(loss_type: str, row: str, draw: Draw, *, smoothed: bool = False, **ours: Any) -> Iterator[Compared]:
    """A `loss_type`, with the likelihood of the gold completion: one mean over the tokens of the batch."""
    logits, ids, mask = draw_triples(draw)
    beta, smoothing = draw.choose([0.01, 2.0], "beta"), draw.choose([0.0, 0.1], "label smoothing")
    nll_weight = draw.choose([0.3, 1.0], "tpo_alpha")
    options = {"loss_type": loss_type, "beta": beta, "tpo_alpha": nll_weight, "tpo_l_gamma": 0.5}
    trainer = upstream_pairs.pair_trainer(label_smoothing=smoothing, **options)
    batch = upstream_pairs.completions(mask) | {"input_ids": ids}
    theirs = upstream_pairs.computed("TPOTrainer", trainer, SimpleNamespace(logits=logits), batch)
    ours |= {"beta": beta, "nll_weight": nll_weight} | ({"label_smoothing": smoothing} if smoothed else {})
    if loss_type == "tpo-l":
        ours["gamma_beta_ratio"] = 0.5 / beta
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    chosen, rejected, _ = sequence_logprobs(logprobs, mask, average=loss_type in {"ipo", "tpo-l"}).chunk(3)
    nll = -aggregate(logprobs.chunk(3)[2], mask.chunk(3)[2], "token-mean")
    loss = kernel("preference", row)(chosen, rejected, nll.expand(chosen.shape), **ours).loss.mean()
    magnitude = (10 + 1 / beta) ** 2
    yield Compared(loss, theirs, mask.numel(), magnitude, scale=max(1.0, largest_number(theirs)))
    mine, want = (torch.autograd.grad(x, logits)[0] for x in (loss, theirs))
    yield Compared(mine, want, mask.numel(), magnitude, what=GRADIENT, scale=max(beta, largest_number(want)))


simpo = partial(cpo, average=True, with_nll=False)
# A trainer's loss, its loss_type, our row, and how they are compared.
LOSSES: tuple[tuple[str, str, str, str, Any], ...] = (
    ("CPOTrainer", "sigmoid", "sigmoid", "cpo@trl", cpo),
    ("CPOTrainer", "hinge", "hinge", "cpo@trl", partial(cpo, link="hinge")),
    ("CPOTrainer", "ipo", "ipo", "cpo@trl", partial(cpo, average=True, link="square")),
    ("CPOTrainer", "simpo, cpo_alpha=0", "simpo", "simpo@trl", simpo),
    ("CPOTrainer", "simpo", "simpo", "cpo_simpo@trl", partial(cpo, average=True)),
    ("CPOTrainer", "alphapo", "simpo", "alpha_po@trl", partial(simpo, with_alpha=True)),
    ("KTOTrainer", "kto", "kto", "kto@trl", kto),
    ("KTOTrainer", "apo_zero_unpaired", "apo_zero_unpaired", "apo_zero_unpaired@trl", kto),
    ("TPOTrainer", "sigmoid", "sigmoid", "tpo@trl", partial(tpo, smoothed=True)),
    ("TPOTrainer", "hinge", "hinge", "cpo@trl", partial(tpo, link="hinge")),
    ("TPOTrainer", "ipo", "ipo", "cpo@trl", partial(tpo, link="square")),
    ("TPOTrainer", "tpo-l", "tpo-l", "tpo_l@trl", partial(tpo, smoothed=True)),
)
CLAIMS = [
    *(
        claim("preference", row, trainer, name, partial(compare, loss_type, row), loss_type=loss_type)
        for trainer, name, loss_type, row, compare in LOSSES
    ),
    claim("preference", "orpo@trl", "ORPOTrainer", "", orpo, "TRL takes the odds in float32"),
]
