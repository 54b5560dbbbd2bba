"""Where preference losses differ on purpose from the installed DPO and CPO trainers, and their scores."""

import pytest
import torch
from trl.experimental.cpo import CPOConfig

from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream_pairs
from composer_plugins.kernels.preference import sequence_logprobs
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity


@pytest.mark.parametrize("name", ["simpo", "cpo_simpo", "alpha_po", "cpo"])
def test_a_dialect_has_the_defaults_of_cpo_config(name: str) -> None:
    config = CPOConfig(bf16=False)
    gamma = config.simpo_gamma / config.beta
    theirs = {"beta": config.beta, "gamma_beta_ratio": gamma, "label_smoothing": config.label_smoothing}
    theirs |= {"nll_weight": config.cpo_alpha, "alpha": config.alpha}
    ours = choose("preference", f"{name}@trl")
    known = theirs.keys() & ours.loss.parameters
    assert {key: ours.value(key) for key in known} == {key: theirs[key] for key in known}


def test_hinge_and_sft_cannot_be_weighted_in_trl() -> None:
    """WPO multiplies a pair's loss in place: relu keeps its output for its gradient, sft's is expanded."""
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    trainer = upstream_pairs.dpo_trainer(logprobs.detach(), ["hinge"], use_weighting=True)
    loss = upstream_pairs.dpo_loss(trainer, logprobs, mask)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    trainer.loss_types = ["sft"]
    twice = torch.cat([logprobs, logprobs])
    with pytest.raises(RuntimeError, match="single memory location"):
        upstream_pairs.dpo_loss(trainer, twice, torch.ones_like(twice, dtype=torch.bool))


def test_trl_need_not_mask_what_its_model_leaves_at_0_and_we_do() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    theirs = upstream_pairs.dpo_loss(
        upstream_pairs.dpo_trainer(logprobs.detach(), ["sigmoid"]), logprobs, mask
    )
    scores = [
        *sequence_logprobs(logprobs, mask).chunk(2),
        *sequence_logprobs(logprobs, mask).detach().chunk(2),
    ]
    ours = kernel("preference", "dpo@trl")(*scores).loss.mean()
    mine, want = (torch.autograd.grad(x, logprobs)[0] for x in (ours, theirs))
    assert (want[~mask] != 0).all() and not mine[~mask].any()


def test_discopop_is_finite_where_trl_is_nan() -> None:
    """At a margin of -1000 nats its gate is 0 and its exponential inf."""
    logprobs = torch.tensor([[-1000.0], [0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 1, dtype=torch.bool)
    trainer = upstream_pairs.dpo_trainer(torch.zeros_like(logprobs), ["discopop"], beta=1.0)
    assert upstream_pairs.dpo_loss(trainer, logprobs, mask).isnan()
    scores = [*logprobs.sum(-1).chunk(2), *torch.zeros(2, 1, dtype=torch.float64)]
    ours = kernel("preference", "discopop@trl")(*scores, beta=1.0).loss
    assert_parity(ours, torch.tensor([1000.0]), terms=1)


def test_alpha_divergence_in_float64_is_a_key_error_in_trl() -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64)
    trainer = upstream_pairs.dpo_trainer(logprobs, ["sigmoid"], f_divergence_type="alpha_divergence")
    with pytest.raises(KeyError):
        upstream_pairs.dpo_loss(trainer, logprobs, torch.ones(2, 1, dtype=torch.bool))


@pytest.mark.parametrize(("loss_type", "row"), [("sigmoid", "dpo@trl"), ("sigmoid_norm", "sigmoid_norm@trl")])
def test_trl_ignores_label_smoothing_that_our_dpo_honours(loss_type: str, row: str) -> None:
    logprobs = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64)
    reference, mask = torch.full_like(logprobs, -1.5), torch.ones(2, 1, dtype=torch.bool)
    trainer = upstream_pairs.dpo_trainer(reference, [loss_type], beta=0.5, label_smoothing=0.3)
    theirs = upstream_pairs.dpo_loss(trainer, logprobs, mask)
    scores = [*logprobs.sum(-1).chunk(2), *reference.sum(-1).chunk(2)]
    assert theirs.item() == pytest.approx(kernel("preference", row)(*scores, beta=0.5).loss.item(), rel=1e-14)
    smoothed = kernel("preference", "dpo")(*scores, beta=0.5, label_smoothing=0.3).loss
    assert smoothed.item() > theirs.item() + 0.1
