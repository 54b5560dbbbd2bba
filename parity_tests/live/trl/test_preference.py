"""Preference losses against the installed DPO, KTO, CPO, ORPO and TPO trainers: value and gradient.

The gradient is compared in the log-probabilities of the tokens, so that sums, averages, LD-DPO's and
WPO's weights are compared with it. TRL's models give zeros where nothing is completed, and so do these.
"""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.experimental.tpo import TPOTrainer

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.preference import (
    kto_reference_point,
    ld_logprobs,
    sequence_logprobs,
    weighted,
    wpo_weights,
)
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import seeds
from parity_tests.support import trl_live
from parity_tests.support.dialects import kernel

DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}


@dataclass(frozen=True)
class Drawn:
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
        if self.ld_alpha is None or average:
            return sequence_logprobs(logprobs, self.mask, average=average)
        other = self.mask.roll(len(self.mask) // 2, 0)
        return ld_logprobs(logprobs, self.mask, other, ld_alpha=self.ld_alpha)

    def nll(self) -> Tensor:
        """Mean negative log-likelihood per token of the chosen."""
        return -sequence_logprobs(self.policy, self.mask, average=True).chunk(2)[0]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Masks have holes and empty rows."""
    g = torch.Generator().manual_seed(draw(seeds, label="seed"))
    rows, width = 2 * draw(st.integers(1, 4), label="pairs"), draw(st.integers(1, 6), label="tokens")
    mask = torch.rand(rows, width, generator=g) < draw(st.sampled_from([0.5, 1.0]), label="live")
    x = torch.rand(3, rows, width, generator=g, dtype=torch.float64).where(mask, 0.0)
    x = x * -draw(st.sampled_from([0.1, 4.0, 30.0]), label="spread")
    return Drawn(
        *(x[0].requires_grad_(), x[1], x[2] / 4, mask),
        beta=draw(st.sampled_from([0.1, 0.5, 2.0]), label="beta"),
        label_smoothing=draw(st.sampled_from([1e-3, 0.1, 0.3]), label="label smoothing"),
        f_divergence_type=draw(st.sampled_from(sorted(DIVERGENCES)), label="divergence"),
        ld_alpha=draw(st.sampled_from([None, 0.0, 0.5]), label="LD-DPO"),
        use_weighting=draw(st.booleans(), label="WPO"),
    )


def assert_same(
    ours: Tensor, theirs: Tensor, d: Drawn, noise: float = 0.0, dtype: torch.dtype = torch.float64
) -> None:
    """Losses and gradients; margins of some hundred nats are squared, or come out of an exponential."""
    largest = float((d.policy - d.reference).detach().abs().sum(-1).max()) + 1
    square = (largest + 1 / d.beta) ** 2 * max(d.beta, 1) + noise
    (mine,), (want,) = (torch.autograd.grad(x, d.policy) for x in (ours, theirs))
    want = want.where(d.mask, 0.0)  # TRL's sums run over all positions
    for name, x, y in (("loss", ours, theirs), ("gradient", mine, want)):
        magnitude = square + largest * float(y.detach().abs().max())
        assert_parity(x, y, terms=d.mask.numel(), magnitude=magnitude, what=name, dtype=dtype)


def assert_dpo(
    d: Drawn,
    loss_type: str,
    row: str,
    *theirs: str,
    average: bool = False,
    discopop_tau: float | None = None,
) -> None:
    """DPOTrainer's `loss_type` is this row; `theirs` are the options of TRL, beside beta, that it reads."""
    options: dict[str, Any] = {name: getattr(d, name) for name in theirs}
    keywords: dict[str, Any] = {"beta": d.beta}
    if discopop_tau is not None:
        options["discopop_tau"] = keywords["tau"] = discopop_tau
    trainer = trl_live.dpo_trainer(d.reference, [loss_type], beta=d.beta, **options)
    want = trl_live.dpo_loss(trainer, d.policy, d.mask, d.log_sum_sq)
    d = d if "ld_alpha" in theirs else replace(d, ld_alpha=None)
    if "label_smoothing" in theirs:
        keywords["label_smoothing"] = d.label_smoothing
    if "f_divergence_type" in theirs:
        keywords["divergence"] = DIVERGENCES[d.f_divergence_type]
    pair = kernel("preference", row)(*d.scores(average), **keywords)
    logged = trainer._metrics["train"]
    for name, metric in pair.metrics.items():
        if not average:
            recorded = torch.tensor(logged[name][0], dtype=torch.float64)
            rounded = float(d.score(d.policy).detach().abs().max()) * d.beta + 1
            scale = {"terms": len(d.mask), "magnitude": rounded}
            assert_parity(metric.value.mean(), recorded, **scale, dtype=torch.float32, what=name)
    if "use_weighting" in theirs and d.use_weighting:
        weights = wpo_weights(d.policy, d.log_sum_sq, d.mask).chunk(2)
        pair = weighted(pair, weights[0] * weights[1])
    assert_same(pair.loss.mean(), want, d)


EVERY = ("f_divergence_type", "ld_alpha", "use_weighting")
few = settings(max_examples=40)


@few
@given(drawn())
def test_dpo_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "sigmoid", "dpo@trl", *EVERY)


@few
@given(drawn())
def test_sigmoid_norm_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "sigmoid_norm", "sigmoid_norm@trl", "use_weighting", average=True)


@few
@given(drawn())
def test_hinge_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "hinge", "hinge@trl", "f_divergence_type", "ld_alpha")


@few
@given(drawn())
def test_ipo_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "ipo", "ipo@trl", "use_weighting", average=True)


@few
@given(drawn())
def test_exo_pair_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "exo_pair", "exo_pair@trl", "label_smoothing", *EVERY)


@few
@given(drawn())
def test_robust_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "robust", "robust@trl", "label_smoothing", *EVERY)


@few
@given(drawn(), st.sampled_from([0.05, 1.0]))
def test_discopop_equals_trl(d: Drawn, tau: float) -> None:
    """As far as its exponential does not overflow."""
    if d.f_divergence_type == "forward_kl":
        assume(float(d.policy.detach().sum(-1).min()) > -4)
    assume(d.beta * float((d.policy - d.reference).detach().abs().sum(-1).max()) < 300)
    assert_dpo(d, "discopop", "discopop@trl", *EVERY, discopop_tau=tau)


@few
@given(drawn())
def test_nca_pair_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "nca_pair", "nca_pair@trl", "ld_alpha", "use_weighting")


@few
@given(drawn())
def test_bco_pair_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "bco_pair", "bco_pair@trl", "ld_alpha", "use_weighting")


@few
@given(drawn())
def test_sppo_hard_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "sppo_hard", "sppo_hard@trl", "ld_alpha", "use_weighting")


@few
@given(drawn())
def test_apo_zero_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "apo_zero", "apo_zero@trl", "ld_alpha", "use_weighting")


@few
@given(drawn())
def test_apo_down_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "apo_down", "apo_down@trl", "ld_alpha", "use_weighting")


@few
@given(drawn())
def test_aot_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "aot", "aot@trl", "label_smoothing", "ld_alpha")


@few
@given(drawn())
def test_aot_unpaired_equals_trl(d: Drawn) -> None:
    assert_dpo(d, "aot_unpaired", "aot_unpaired@trl", "label_smoothing", "ld_alpha")


def test_hinge_and_sft_cannot_be_weighted_in_trl() -> None:
    """WPO multiplies a pair's loss in place: relu keeps its output for its gradient, sft's is expanded."""
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    trainer = trl_live.dpo_trainer(logprobs.detach(), ["hinge"], use_weighting=True)
    loss = trl_live.dpo_loss(trainer, logprobs, mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    trainer.loss_types = ["sft"]
    twice = torch.cat([logprobs, logprobs])
    with pytest.raises(RuntimeError, match="single memory location"):
        trl_live.dpo_loss(trainer, twice, torch.ones_like(twice, dtype=torch.bool))


def test_discopop_is_finite_where_trl_is_nan() -> None:
    """At a margin of -1000 nats its gate is 0 and its exponential inf."""
    logprobs = torch.tensor([[-1000.0], [0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    trainer = trl_live.dpo_trainer(torch.zeros_like(logprobs), ["discopop"], beta=1.0)
    assert trl_live.dpo_loss(trainer, logprobs, mask).isnan()
    scores = [*logprobs.sum(-1).chunk(2), *torch.zeros(2, 1, dtype=torch.float64)]
    ours = kernel("preference", "discopop@trl")(*scores, beta=1.0).loss
    assert_parity(ours, torch.tensor([1000.0]), terms=1)


@pytest.mark.parametrize("alpha", [0.5, 0.1, 1.0, 1.0 + 1e-7, 2.0])
@few
@given(drawn())
def test_alpha_divergence_equals_trl_in_float32(alpha: float, d: Drawn) -> None:
    """In float64 TRL has no clamp for it, and raises a KeyError; beyond 78 nats the two clamps differ."""
    d = replace(d, policy=(d.policy / 3).float().detach().requires_grad_(), reference=d.reference.float() / 3)
    assume(float((d.policy - d.reference).detach().sum(-1).abs().max()) * abs(alpha - 1) < 8)
    named = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
    trainer = trl_live.dpo_trainer(d.reference, ["sigmoid"], beta=d.beta, **named)
    want = trl_live.dpo_loss(trainer, d.policy, d.mask)
    d = replace(d, ld_alpha=None)
    ours = kernel("preference", "dpo@trl")(*d.scores(), beta=d.beta, divergence="alpha", alpha=alpha)
    # (e^(k u) - 1) / k: TRL's difference with 1 is rounded before it is divided.
    noise = 3000 / max(abs(alpha - 1), 0.5)
    assert_same(ours.loss.mean(), want, d, noise, torch.float32)


def test_alpha_divergence_in_float64_is_a_key_error_in_trl() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64)
    trainer = trl_live.dpo_trainer(logprobs, ["sigmoid"], f_divergence_type="alpha_divergence")
    with pytest.raises(KeyError):
        trl_live.dpo_loss(trainer, logprobs, torch.ones(2, 1, dtype=torch.bool))


@few
@given(drawn())
def test_sft_equals_trl(d: Drawn) -> None:
    """TRL's is one mean over the tokens of the batch: a mean over pairs that weigh their lengths."""
    lengths = d.mask.double().sum(-1).chunk(2)[0]
    assume(bool(lengths.any()))
    trainer = trl_live.dpo_trainer(d.reference, ["sft"])
    theirs = trl_live.dpo_loss(trainer, d.policy, d.mask)
    pair = weighted(kernel("preference", "sft@trl")(d.nll()), lengths / lengths.sum())
    assert_same(pair.loss.sum(), theirs, d)


@few
@given(drawn())
def test_several_losses_of_trl_are_their_weighted_sum(d: Drawn) -> None:
    """MPO: "sigmoid", "bco_pair" and "ipo" with weights."""
    d = replace(d, ld_alpha=None)
    weights = [0.8, 0.2, -0.1]
    trainer = trl_live.dpo_trainer(
        d.reference, ["sigmoid", "bco_pair", "ipo"], beta=d.beta, loss_weights=weights
    )
    theirs = trl_live.dpo_loss(trainer, d.policy, d.mask)
    terms = [("dpo@trl", False), ("bco_pair@trl", False), ("ipo@trl", True)]
    losses = [kernel("preference", name)(*d.scores(mean), beta=d.beta).loss.mean() for name, mean in terms]
    ours = sum(w * loss for w, loss in zip(weights, losses, strict=True))
    assert_same(ours, theirs, d)


def assert_cpo(
    d: Drawn, loss_type: str, row: str, *, average: bool = False, gamma: float = 0.5, **ours: Any
) -> None:
    """CPOTrainer's `loss_type` is this row, with its NLL as with a weight of 0."""
    d = replace(d, ld_alpha=None)
    for weight in (0.0, 0.7):
        theirs = trl_live.batch_loss(
            CPOTrainer,
            *d.scores(average)[:2],
            d.nll().mean(),
            loss_type=loss_type,
            beta=d.beta,
            simpo_gamma=gamma,
            label_smoothing=d.label_smoothing,
            alpha=ours.get("alpha", 0.0),
            cpo_alpha=weight,
        )
        keywords = {"beta": d.beta, "label_smoothing": d.label_smoothing} | ours
        inputs = d.scores(average)[:2]
        if row in {"cpo@trl", "cpo_simpo@trl"}:
            inputs, keywords = [*inputs, d.nll()], keywords | {"nll_weight": weight}
        elif weight:
            continue
        if loss_type in {"simpo", "alphapo"}:
            keywords["gamma_beta_ratio"] = gamma / d.beta
        pair = kernel("preference", row)(*inputs, **keywords)
        steepest = float(d.policy.detach().abs().max()) * abs(keywords.get("alpha", 0.0))
        assert_same(pair.loss.mean(), theirs, d, d.beta * math.exp(steepest) / d.mask.shape[1])


gammas = st.sampled_from([0.0, 0.5, 1.4])


@few
@given(drawn())
def test_cpo_equals_trl(d: Drawn) -> None:
    assert_cpo(d, "sigmoid", "cpo@trl")
    assert_cpo(d, "hinge", "cpo@trl", link="hinge")
    assert_cpo(d, "ipo", "cpo@trl", link="square", average=True)


@few
@given(drawn(), gammas)
def test_simpo_equals_trl(d: Drawn, gamma: float) -> None:
    assert_cpo(d, "simpo", "simpo@trl", average=True, gamma=gamma)


@few
@given(drawn(), gammas)
def test_cpo_simpo_equals_trl(d: Drawn, gamma: float) -> None:
    assert_cpo(d, "simpo", "cpo_simpo@trl", average=True, gamma=gamma)


@few
@given(drawn(), gammas, st.sampled_from([0.0, 0.25, -0.5]))
def test_alpha_po_equals_trl(d: Drawn, gamma: float, alpha: float) -> None:
    """A CPOConfig makes "alphapo" a "simpo" with alpha."""
    assert CPOConfig(loss_type="alphapo", bf16=False).loss_type == "simpo"
    assert_cpo(d, "simpo", "alpha_po@trl", average=True, gamma=gamma, alpha=alpha)


@few
@given(drawn())
def test_orpo_equals_trl(d: Drawn) -> None:
    """TRL takes the odds in float32."""
    assume(bool(d.mask.any(-1).all()))
    theirs = trl_live.batch_loss(ORPOTrainer, *d.scores(average=True)[:2], d.nll().mean(), beta=d.beta)
    ours = kernel("preference", "orpo@trl")(*d.scores(average=True)[:2], d.nll(), beta=d.beta).loss.mean()
    assert_same(ours, theirs, d, dtype=torch.float32)


@pytest.mark.parametrize("labels", ["mixed", "good", "bad"])
@few
@given(drawn(), st.sampled_from([1.0, 0.3]), st.floats(-3, 3))
def test_kto_equals_trl(labels: str, d: Drawn, weight: float, drift: float) -> None:
    """The reference point is of other completions, and 0 where its mean is negative."""
    assert_kto(d, labels, weight, drift, "kto")


@pytest.mark.parametrize("labels", ["mixed", "good", "bad"])
@few
@given(drawn(), st.sampled_from([1.0, 0.3]))
def test_apo_zero_unpaired_equals_trl(labels: str, d: Drawn, weight: float) -> None:
    assert_kto(d, labels, weight, 0.0, "apo_zero_unpaired")


def assert_kto(d: Drawn, labels: str, weight: float, drift: float, loss_type: str) -> None:
    d = replace(d, ld_alpha=None)
    scores, reference = d.score(d.policy), d.score(d.reference)
    mismatched = torch.linspace(drift, 2 * drift, len(scores), dtype=torch.float64)
    desirable = torch.tensor(
        [labels == "good" or (labels == "mixed" and i % 3 < 2) for i in range(len(scores))]
    )
    weights = {"desirable_weight": weight, "undesirable_weight": 1.3}
    theirs = trl_live.kto_loss(
        *(d.policy, d.mask),
        labels=desirable,
        ref_logps=reference,
        kl_logps=mismatched,
        ref_kl_logps=torch.zeros_like(mismatched),
        loss_type=loss_type,
        beta=d.beta,
        **weights,
    )
    inputs = [scores, reference, desirable]
    if loss_type == "kto":
        inputs.append(kto_reference_point(mismatched, torch.zeros_like(mismatched)))
    pair = kernel("preference", f"{loss_type}@trl")(*inputs, beta=d.beta, **weights)
    assert_same(pair.loss.mean(), theirs, d)


@st.composite
def triples(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, token ids and mask of [chosen; rejected; gold]; the gold ones have a token at least."""
    g = torch.Generator().manual_seed(draw(seeds, label="seed"))
    rows, width, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(2, 6))
    logits = 3 * torch.randn(3 * rows, width + 1, vocab, generator=g, dtype=torch.float64)
    ids = torch.randint(0, vocab, (3 * rows, width + 1), generator=g)
    mask = torch.rand(3 * rows, width, generator=g) < 0.7
    mask[-1, 0] = True
    return logits.requires_grad_(), ids, mask


@few
@given(triples(), st.sampled_from([0.01, 2.0]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.3, 1.0]))
def test_tpo_equals_trl(drawn: tuple[Tensor, ...], beta: float, smoothing: float, weight: float) -> None:
    """Two more of its loss types are CPO's, with the likelihood of the gold completion."""
    keywords = {"beta": beta, "nll_weight": weight}
    assert_tpo(drawn, "sigmoid", "tpo@trl", smoothing, **keywords, label_smoothing=smoothing)
    assert_tpo(drawn, "hinge", "cpo@trl", smoothing, **keywords, link="hinge")
    assert_tpo(drawn, "ipo", "cpo@trl", smoothing, **keywords, link="square")


@few
@given(triples(), st.sampled_from([0.01, 2.0]), st.sampled_from([0.0, 0.1]), st.sampled_from([0.3, 1.0]))
def test_tpo_l_equals_trl(drawn: tuple[Tensor, ...], beta: float, smoothing: float, weight: float) -> None:
    keywords = {"beta": beta, "nll_weight": weight, "label_smoothing": smoothing}
    assert_tpo(drawn, "tpo-l", "tpo_l@trl", smoothing, **keywords, gamma_beta_ratio=0.5 / beta)


def assert_tpo(drawn: tuple[Tensor, ...], loss_type: str, row: str, smoothing: float, **ours: Any) -> None:
    """Its likelihood is one mean over the tokens of the batch."""
    logits, ids, mask = drawn
    trainer = trl_live.pair_trainer(
        loss_type=loss_type,
        beta=ours["beta"],
        label_smoothing=smoothing,
        tpo_alpha=ours["nll_weight"],
        tpo_l_gamma=0.5,
    )
    batch = trl_live.completions(mask) | {"input_ids": ids}
    with trl_live.in_float64():
        theirs = TPOTrainer._compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), batch, False)
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    chosen, rejected, _ = sequence_logprobs(logprobs, mask, average=loss_type in {"ipo", "tpo-l"}).chunk(3)
    nll = -aggregate(logprobs.chunk(3)[2], mask.chunk(3)[2], "token-mean")
    loss = kernel("preference", row)(chosen, rejected, nll.expand(chosen.shape), **ours).loss.mean()
    magnitude = (10 + 1 / ours["beta"]) ** 2
    assert_parity(loss, theirs, terms=mask.numel(), magnitude=magnitude)
    mine, want = (torch.autograd.grad(x, logits)[0] for x in (loss, theirs))
    assert_parity(mine, want, terms=mask.numel(), magnitude=magnitude, what="gradient")


@pytest.mark.parametrize("average", [False, True])
def test_sequence_logprobs_equal_trl(average: bool) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 9, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (3, 6), generator=g)
    labels[0, :4] = labels[1, 4:] = -100
    theirs = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=average)
    shifted = labels[:, 1:]
    tokens = shifted.clamp(min=0)[..., None]
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens).squeeze(-1)
    ours = sequence_logprobs(logprobs, shifted != -100, average=average)
    assert_parity(ours, theirs, terms=6 * 9)
    mine, want = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs))
    assert_parity(mine, want, terms=6 * 9, what="gradient")
