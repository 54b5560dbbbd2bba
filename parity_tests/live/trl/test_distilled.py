"""On-policy distillation against the TRL that is installed: value and gradient."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import seeds
from parity_tests.support import dialects

IWOPDTrainer = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer").IWOPDTrainer


@settings(max_examples=30)
@given(seed=seeds, gamma=st.sampled_from([0.0, 0.5, 2.0]), eps=st.sampled_from([1e-8, 1.0]))
def test_iw_opd_equals_trl(seed: int, gamma: float, eps: float) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 7, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, 7, (3, 5), generator=g)
    teacher, rollout = (-3 * torch.rand(3, 5, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 5, generator=g) < 0.7
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=eps,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    theirs_in, ours_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    theirs = IWOPDTrainer._compute_iw_opd_loss(
        trainer, theirs_in, tokens, torch.where(mask, tokens, -100), teacher, rollout
    )
    logprobs = ours_in.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    token = dialects.kernel("policy", "iw_opd@trl")(logprobs, rollout, teacher, mask, gamma=gamma, eps=eps)
    ours = aggregate(token.loss, mask, "token-mean")
    largest = float(token.loss.detach().abs().max())
    assert_parity(ours, theirs, terms=15, magnitude=largest)
    gradients = [torch.autograd.grad(loss, x)[0] for loss, x in ((ours, ours_in), (theirs, theirs_in))]
    assert_parity(*gradients, terms=15)


def test_trl_raises_without_a_teacher() -> None:
    trainer = SimpleNamespace(temperature=1.0, iw_opd_gamma=0.5, iw_opd_epsilon=1e-8)
    tokens, missing = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[torch.nan, -1.0]])
    with pytest.raises(ValueError, match="Teacher logprobs are missing"):
        IWOPDTrainer._compute_iw_opd_loss(trainer, torch.zeros(1, 2, 3), tokens, tokens, missing)
