"""DPO and SimPO against the installed TRL on drawn scores: value, gradient and what it logs.

TRL is called, not copied: its methods on the few attributes of `self` that they read.
"""

from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from trl import DPOTrainer
from trl.experimental.cpo import CPOTrainer

from composer_plugins.kernels.preference import dpo, sequence_logprobs, simpo
from parity_tests.assertions import assert_parity
from parity_tests.strategies import seeds

ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x)


@st.composite
def completions(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of policy and reference, 0 where masked, and the mask: [chosen; rejected]."""
    g = torch.Generator().manual_seed(draw(seeds))
    rows, width = 2 * draw(st.integers(1, 4)), draw(st.integers(1, 6))
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = torch.arange(width) < lengths
    policy, reference = -4 * torch.rand(2, rows, width, generator=g, dtype=torch.float64)
    return policy.where(mask, 0.0).requires_grad_(), reference.where(mask, 0.0), mask


def trl_dpo(
    logprobs: Tensor, reference: Iterable[Tensor], mask: Tensor, beta: float, loss_type: str
) -> tuple[Tensor, dict[str, list[float]]]:
    """The loss of DPOTrainer and what it logged; its `completion_mask` has a position for the prompt."""
    nothing = torch.zeros_like(logprobs).detach()
    outputs = SimpleNamespace(
        log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=ACCELERATOR,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.3,  # which "sigmoid" ignores
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    completion_mask = torch.nn.functional.pad(mask.long(), (1, 0))
    chosen, rejected = reference
    inputs = {
        "input_ids": completion_mask,
        "attention_mask": completion_mask,
        "completion_mask": completion_mask,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss, trainer._metrics["train"]


@given(completions(), st.sampled_from([0.1, 0.5, 2.0]))
def test_dpo_equals_trl_sigmoid_and_logs_the_same(batch: tuple[Tensor, Tensor, Tensor], beta: float) -> None:
    logprobs, reference, mask = batch
    references = sequence_logprobs(reference, mask).chunk(2)
    theirs, logged = trl_dpo(logprobs, references, mask, beta, "sigmoid")
    ours = dpo(*sequence_logprobs(logprobs, mask).chunk(2), *references, beta=beta)
    assert_same(ours.loss.mean(), theirs, logprobs, mask)
    for name, metric in ours.metrics.items():
        rewards = abs(logged["rewards/chosen"][0]) + abs(logged["rewards/rejected"][0]) + 1
        assert metric.value.mean().item() == pytest.approx(logged[name][0], abs=1e-7 * rewards)


@given(completions(), st.sampled_from([0.1, 0.5, 2.0]))
def test_dpo_on_average_scores_equals_trl_sigmoid_norm(
    batch: tuple[Tensor, Tensor, Tensor], beta: float
) -> None:
    logprobs, reference, mask = batch
    sums = sequence_logprobs(reference, mask).chunk(2)
    theirs, _ = trl_dpo(logprobs, sums, mask, beta, "sigmoid_norm")
    policy, averages = (sequence_logprobs(x, mask, average=True).chunk(2) for x in (logprobs, reference))
    assert_same(dpo(*policy, *averages, beta=beta).loss.mean(), theirs, logprobs, mask)


def assert_same(ours: Tensor, theirs: Tensor, logprobs: Tensor, mask: Tensor) -> None:
    """Losses and gradients; TRL sums masked positions, which are 0 there, so its gradient is not."""
    scale = {"terms": logprobs.numel(), "magnitude": float(logprobs.detach().abs().max()) + 1}
    assert_parity(ours, theirs, **scale)
    (mine,), (want,) = (torch.autograd.grad(x, logprobs) for x in (ours, theirs))
    assert_parity(mine, want.where(mask, 0.0), **scale, what="gradient")


@given(
    seeds,
    st.sampled_from([0.1, 2.0, 10.0]),
    st.sampled_from([0.0, 0.5, 1.4]),
    st.sampled_from([0.0, 0.1]),
)
def test_simpo_equals_trl_cpo_whose_gamma_is_beta_times_our_ratio(
    seed: int, beta: float, gamma: float, smoothing: float
) -> None:
    """The NLL that CPOTrainer adds is `cpo_alpha`, 1 by default: set it to 0 for SimPO."""
    g = torch.Generator().manual_seed(seed)
    scores = [(-3 * torch.rand(4, generator=g, dtype=torch.float64)).requires_grad_() for _ in "cr"]
    trainer = SimpleNamespace(
        alpha=0.0,
        loss_type="simpo",
        beta=beta,
        simpo_gamma=gamma,
        label_smoothing=smoothing,
        accelerator=ACCELERATOR,
    )
    theirs, *rewards = CPOTrainer.cpo_loss(trainer, *scores)
    ours = simpo(*scores, beta=beta, gamma_beta_ratio=gamma / beta, label_smoothing=smoothing)
    scale = {"terms": 4, "magnitude": 3 * beta + gamma + 1}
    assert_parity(ours.loss, theirs, **scale)
    mine, want = (torch.autograd.grad(x.sum(), scores) for x in (ours.loss, theirs))
    assert_parity(torch.stack(mine), torch.stack(want), **scale, what="gradient")
    for side, reward in zip(("chosen", "rejected"), rewards, strict=True):
        assert torch.equal(ours.metrics[f"rewards/{side}"].value, reward)


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
