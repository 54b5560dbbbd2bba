"""DPOTrainer's preference losses.

The gradient is compared in the log-probabilities of the tokens, so that sums, averages, LD-DPO's and WPO's
weights are compared with it. TRL's models give zeros where nothing is completed, and so do these.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.claims import GRADIENT, VALUE, Compared
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream_pairs
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.kernels.preference import ld_logprobs, sequence_logprobs, weighted, wpo_weights
from composer_plugins.testing.draws import Draw, assume, flag, generator

DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities [chosen; rejected], 0 where masked, and options by TRL's names."""

    policy: Tensor
    reference: Tensor
    log_sum_sq: Tensor
    mask: Tensor
    beta: float
    label_smoothing: float
    f_divergence_type: str
    ld_alpha: float | None
    use_weighting: bool

    def scores(self, average: bool = False) -> list[Tensor]:
        """Of chosen and rejected, under the policy and then under the reference."""
        return [half for x in (self.policy, self.reference) for half in self.score(x, average).chunk(2)]

    def score(self, logprobs: Tensor, average: bool = False) -> Tensor:
        """One number for each completion: a sum, or an average, or LD-DPO's weighted sum."""
        if self.ld_alpha is None or average:
            return sequence_logprobs(logprobs, self.mask, average=average)
        other = self.mask.roll(len(self.mask) // 2, 0)
        return ld_logprobs(logprobs, self.mask, other, ld_alpha=self.ld_alpha)

    def nll(self) -> Tensor:
        """Mean negative log-likelihood per token of the chosen."""
        return -sequence_logprobs(self.policy, self.mask, average=True).chunk(2)[0]


def draw_pairs(draw: Draw) -> Pairs:
    """Masks have holes and empty rows."""
    g = generator(draw)
    rows, width = 2 * draw.integer(1, 4, "pairs"), draw.integer(1, 6, "tokens")
    mask = torch.rand(rows, width, generator=g) < draw.choose([0.5, 1.0], "unmasked")
    x = torch.rand(3, rows, width, generator=g, dtype=torch.float64).where(mask, 0.0)
    x = x * -draw.choose([0.1, 4.0, 30.0], "spread")
    return Pairs(
        *(x[0].requires_grad_(), x[1], x[2] / 4, mask),
        beta=draw.choose([0.1, 0.5, 2.0], "beta"),
        label_smoothing=draw.choose([1e-3, 0.1, 0.3], "label smoothing"),
        f_divergence_type=draw.choose(sorted(DIVERGENCES), "divergence"),
        ld_alpha=draw.choose([None, 0.0, 0.5], "LD-DPO"),
        use_weighting=flag(draw, "WPO"),
    )


def parity(
    ours: Tensor, theirs: Tensor, pairs: Pairs, noise: float = 0.0, dtype: torch.dtype = torch.float64
) -> Iterator[Compared]:
    """Losses and gradients; margins of some hundred nats are squared, or come out of an exponential.

    That bounds the terms. The errors are relative to the loss or 1, and to the gradient or beta.
    """
    largest = float((pairs.policy - pairs.reference).detach().abs().sum(-1).max()) + 1
    square = (largest + 1 / pairs.beta) ** 2 * max(pairs.beta, 1) + noise
    (mine,), (want,) = (torch.autograd.grad(x, pairs.policy) for x in (ours, theirs))
    want = want.where(pairs.mask, 0.0)  # TRL's sums run over all positions
    for x, y, what, unit in ((ours, theirs, VALUE, 1.0), (mine, want, GRADIENT, pairs.beta)):
        size = float(y.detach().abs().max())
        magnitude = square + largest * size
        yield Compared(x, y, pairs.mask.numel(), magnitude, dtype, what, max(size, unit))


def dpo(
    loss_type: str,
    row: str,
    theirs: tuple[str, ...],
    average: bool,
    draw: Draw,
    *,
    pairs: Pairs | None = None,
    discopop_tau: float | None = None,
) -> Iterator[Compared]:
    """A `loss_type`; `theirs` are the options of TRL, except beta, that it reads. Its metrics too."""
    d = draw_pairs(draw) if pairs is None else pairs
    options: dict[str, Any] = {name: getattr(d, name) for name in theirs}
    keywords: dict[str, Any] = {"beta": d.beta}
    if discopop_tau is not None:
        options["discopop_tau"] = keywords["tau"] = discopop_tau
    trainer = upstream_pairs.dpo_trainer(d.reference, [loss_type], beta=d.beta, **options)
    want = upstream_pairs.dpo_loss(trainer, d.policy, d.mask, d.log_sum_sq)
    d = d if "ld_alpha" in theirs else replace(d, ld_alpha=None)
    if "label_smoothing" in theirs:
        keywords["label_smoothing"] = d.label_smoothing
    if "f_divergence_type" in theirs:
        keywords["divergence"] = DIVERGENCES[d.f_divergence_type]
    pair = kernel("preference", row)(*d.scores(average), **keywords)
    logged = trainer._metrics["train"]
    for name, metric in pair.metrics.items() if not average else ():
        recorded = torch.tensor(logged[name][0], dtype=torch.float64)
        rounded = float(d.score(d.policy).detach().abs().max()) * d.beta + 1
        yield Compared(metric.value.mean(), recorded, len(d.mask), rounded, torch.float32, name)
    if "use_weighting" in theirs and d.use_weighting:
        weights = wpo_weights(d.policy, d.log_sum_sq, d.mask).chunk(2)
        pair = weighted(pair, weights[0] * weights[1])
    yield from parity(pair.loss.mean(), want, d)


EVERY = ("f_divergence_type", "ld_alpha", "use_weighting")
LD_WPO = ("ld_alpha", "use_weighting")
DPO_LOSSES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "sigmoid": ("dpo@trl", EVERY, False),
    "sigmoid_norm": ("sigmoid_norm@trl", ("use_weighting",), True),
    "hinge": ("hinge@trl", ("f_divergence_type", "ld_alpha"), False),
    "ipo": ("ipo@trl", ("use_weighting",), True),
    "exo_pair": ("exo_pair@trl", ("label_smoothing", *EVERY), False),
    "robust": ("robust@trl", ("label_smoothing", *EVERY), False),
    "nca_pair": ("nca_pair@trl", LD_WPO, False),
    "bco_pair": ("bco_pair@trl", LD_WPO, False),
    "sppo_hard": ("sppo_hard@trl", LD_WPO, False),
    "apo_zero": ("apo_zero@trl", LD_WPO, False),
    "apo_down": ("apo_down@trl", LD_WPO, False),
    "aot": ("aot@trl", ("label_smoothing", "ld_alpha"), False),
    "aot_unpaired": ("aot_unpaired@trl", ("label_smoothing", "ld_alpha"), False),
}


def discopop(draw: Draw) -> Iterator[Compared]:
    """As far as its exponential does not overflow."""
    d, tau = draw_pairs(draw), draw.choose([0.05, 1.0], "tau")
    if d.f_divergence_type == "forward_kl":
        assume(float(d.policy.detach().sum(-1).min()) > -4)
    assume(d.beta * float((d.policy - d.reference).detach().abs().sum(-1).max()) < 300)
    yield from dpo("discopop", "discopop@trl", EVERY, False, draw, pairs=d, discopop_tau=tau)


def divergence(name: str, draw: Draw) -> Iterator[Compared]:
    """DPO's loss with one f-divergence."""
    d = replace(draw_pairs(draw), f_divergence_type=name)
    yield from dpo("sigmoid", "dpo@trl", EVERY, False, draw, pairs=d)


def alpha_divergence(draw: Draw) -> Iterator[Compared]:
    """In float64 TRL has no clamp for it, and raises a KeyError; beyond 78 nats the two clamps differ."""
    alpha, d = draw.choose([0.5, 0.1, 1.0, 1.0 + 1e-7, 2.0], "alpha"), draw_pairs(draw)
    policy = (d.policy / 3).float().detach().requires_grad_()
    d = replace(d, policy=policy, reference=d.reference.float() / 3, ld_alpha=None)
    assume(float((d.policy - d.reference).detach().sum(-1).abs().max()) * abs(alpha - 1) < 8)
    named: dict[str, Any] = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    trainer = upstream_pairs.dpo_trainer(d.reference, ["sigmoid"], beta=d.beta, **named)
    want = upstream_pairs.dpo_loss(trainer, d.policy, d.mask)
    ours = kernel("preference", "dpo@trl")(*d.scores(), beta=d.beta, divergence="alpha", alpha=alpha)
    # (e^(k u) - 1) / k: TRL's difference with 1 is rounded before it is divided.
    noise = 3000 / max(abs(alpha - 1), 0.5)
    yield from parity(ours.loss.mean(), want, d, noise, torch.float32)


def sft(draw: Draw) -> Iterator[Compared]:
    """TRL's is one mean over the tokens of the batch: a mean over pairs that weigh their lengths."""
    d = draw_pairs(draw)
    lengths = d.mask.double().sum(-1).chunk(2)[0]
    assume(bool(lengths.any()))
    trainer = upstream_pairs.dpo_trainer(d.reference, ["sft"])
    theirs = upstream_pairs.dpo_loss(trainer, d.policy, d.mask)
    pair = weighted(kernel("preference", "sft@trl")(d.nll()), lengths / lengths.sum())
    yield from parity(pair.loss.sum(), theirs, d)


def several(draw: Draw) -> Iterator[Compared]:
    """MPO: "sigmoid", "bco_pair" and "ipo" with weights."""
    d = replace(draw_pairs(draw), ld_alpha=None)
    weights = [0.8, 0.2, -0.1]
    types = ["sigmoid", "bco_pair", "ipo"]
    trainer = upstream_pairs.dpo_trainer(d.reference, types, beta=d.beta, loss_weights=weights)
    theirs = upstream_pairs.dpo_loss(trainer, d.policy, d.mask)
    terms = [("dpo@trl", False), ("bco_pair@trl", False), ("ipo@trl", True)]
    losses = [kernel("preference", name)(*d.scores(mean), beta=d.beta).loss.mean() for name, mean in terms]
    yield from parity(torch.stack(losses) @ torch.tensor(weights, dtype=torch.float64), theirs, d)


preference = partial(claim, "preference")
CLAIMS = [
    *(
        preference(row, "DPOTrainer", name, partial(dpo, name, row, theirs, average), loss_type=name)
        for name, (row, theirs, average) in DPO_LOSSES.items()
    ),
    preference("discopop@trl", "DPOTrainer", "discopop", discopop, loss_type="discopop"),
    preference("sft@trl", "DPOTrainer", "sft", sft, loss_type="sft"),
    *(
        preference("dpo@trl", "DPOTrainer", name, partial(divergence, name), f_divergence_type=name)
        for name in DIVERGENCES
    ),
    preference(
        "dpo@trl",
        "DPOTrainer",
        "alpha_divergence",
        alpha_divergence,
        "in float32",
        f_divergence_type="alpha_divergence",
    ),
    preference("dpo@trl", "DPOTrainer", "sigmoid + bco_pair + ipo", several, "with loss_weights"),
]
