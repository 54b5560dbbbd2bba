"""What TRL's DPO losses do with `label_smoothing`: most ignore it, and cDPO has no name there."""

import pytest
import torch

from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream_pairs


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
