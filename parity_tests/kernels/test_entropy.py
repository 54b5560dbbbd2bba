"""Entropy: per token, as a bonus, and the mask of high-entropy tokens as TRL's quantile has it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels.entropy import entropy, entropy_bonus, high_entropy_mask
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import logit_pairs, token_batches

Batch = dict[str, Tensor]


@given(batch=logit_pairs())
def test_entropy_is_that_of_the_softmax(batch: Batch) -> None:
    """An entry of -inf is as if it were not in the vocabulary, in the gradient too."""
    logits, mask = batch["student_logits"].requires_grad_(), batch["mask"]
    ours = entropy(logits, mask)
    allowed = logits[..., 1:] if torch.isinf(logits).any() else logits
    p = allowed.softmax(-1)
    theirs = torch.where(mask, -(p * allowed.log_softmax(-1)).sum(-1), 0.0)
    assert_parity(ours, theirs, terms=logits.shape[-1], magnitude=40.0)
    gradients = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (ours, theirs)]
    assert_parity(*gradients, terms=logits.shape[-1], magnitude=40.0, what="gradient")


def test_entropy_of_a_masked_token_is_zero_with_zero_gradient_whatever_stands_there() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf]], requires_grad=True)
    ours = entropy(logits, torch.tensor([True, False]))
    ours.sum().backward()
    assert ours[1] == 0 and logits.grad is not None and not logits.grad[1].any()
    assert logits.grad[0].any()
    assert entropy(torch.tensor([[torch.nan, 0.0]]), torch.tensor([True])).isnan().all()


@given(batch=token_batches(), weight=st.sampled_from([0.0, 0.01, -1.0]))
def test_bonus_is_the_entropy_times_its_weight(batch: Batch, weight: float) -> None:
    h, mask = -batch["logprobs"], batch["mask"]
    token = entropy_bonus(with_junk(h, mask), mask, weight=weight)
    assert_parity(token.loss, torch.where(mask, -weight * h, 0.0), terms=1)
    assert torch.equal(token.metrics["entropy"].value, torch.where(mask, h, 0.0))


@given(batch=token_batches(), fraction=st.sampled_from([0.0, 0.2, 0.5, 0.77, 1.0]))
def test_high_entropy_mask_equals_trls_quantile(batch: Batch, fraction: float) -> None:
    """TRL takes the quantile in float32; in float64 it is the same token."""
    h, mask = -batch["logprobs"], batch["mask"]
    ours = high_entropy_mask(with_junk(h, mask), mask, fraction=fraction)
    if not mask.any():
        assert not ours.any()
        return
    threshold = torch.quantile(h[mask], 1 - fraction)
    near = (h - threshold).abs() < 1e-12
    assert torch.equal(ours | (near & mask), (mask & (h >= threshold)) | (near & mask))
    assert ours.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_entropy_leaves_no_token(dtype: torch.dtype) -> None:
    h, mask = torch.tensor([[torch.nan, 1.0, 2.0]], dtype=dtype), torch.tensor([[True, True, True]])
    assert not high_entropy_mask(h, mask, fraction=1.0).any()
    assert high_entropy_mask(h, torch.tensor([[False, True, True]]), fraction=1.0).sum() == 2


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0,), (0, 0)])
def test_of_no_tokens_none_has_a_high_entropy(shape: tuple[int, ...]) -> None:
    h = torch.zeros(shape)
    kept = high_entropy_mask(h, h == 0)
    assert kept.shape == shape and kept.dtype == torch.bool
