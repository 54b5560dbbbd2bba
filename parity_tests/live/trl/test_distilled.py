"""On-policy distillation against the TRL that is installed: value and gradient."""

import hypothesis.strategies as st
import pytest
import torch

from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.trl_claims.distillation import CLAIMS
from composer_plugins.conformance.trl_claims.upstream_distillation import iw_opd_loss
from parity_tests.rigs.claims import check, proves


@proves(CLAIMS, "iw_opd@trl")
def test_iw_opd_equals_trl(claim: Claim, data: st.DataObject) -> None:
    check(claim, data)


def test_trl_raises_without_a_teacher() -> None:
    tokens, missing = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[torch.nan, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="Teacher logprobs are missing"):
        iw_opd_loss(torch.zeros(1, 2, 3), tokens, mask, missing, missing, gamma=0.5, epsilon=1e-8)
