"""PRIME-RL itself, from a checkout: its losses equal ours with its own `type = "custom"`."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from composer_plugins.conformance.prime_rl_claims import claims
from composer_plugins.conformance.prime_rl_claims.claims import OURS, drawn
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.testing.assertions import assert_parity
from docs.generator.written import part
from parity_tests.rigs.claims import check
from parity_tests.rigs.prime_rl_checkout import with_checkout
from parity_tests.rigs.prime_rl_users import USERS, users_loss

pytestmark = with_checkout


@pytest.mark.filterwarnings("ignore:.*multiplies the advantages with the hint")
def test_its_losses_equal_ours_through_its_compute_loss(upstream: Upstream) -> None:
    found = claims.claims(upstream)
    assert found

    @settings(max_examples=60)
    @given(data=st.data())
    def prove(data: st.DataObject) -> None:
        for claim in found:
            check(claim, data)

    prove()


def test_a_loss_by_import_path_runs_through_its_compute_loss(upstream: Upstream) -> None:
    pack = drawn(upstream, 4)  # without weights
    for x in pack.trainer_logprobs:
        x.requires_grad_()
    table = {"type": "custom", "import_path": OURS, "kwargs": USERS}
    loss, metrics = upstream.compute_loss(pack, upstream.loss_fn(**table), 7)
    streams = (pack.trainer_logprobs, pack.advantages, pack.loss_mask, pack.inference_logprobs)
    alone = [
        users_loss(*given, rollout_logprobs=rollout, cap=1.5).loss.sum()
        for *given, rollout in zip(*streams, strict=True)
    ]
    assert_parity(loss, torch.stack(alone).sum() / 7, terms=60)
    assert "composer/policy/capped_frac" in metrics


def test_an_error_of_ours_comes_through_at_the_first_call(upstream: Upstream) -> None:
    table = {"type": "custom", "import_path": OURS, "kwargs": {"polcy": "dppo_tv"}}
    with pytest.raises(ValueError, match="unknown option 'polcy'; did you mean 'policy'"):
        upstream.compute_loss(drawn(upstream, 1), upstream.loss_fn(**table), 7)


def test_docs_findings_have_what_a_new_run_finds() -> None:
    part("docs/findings.md", "prime-rl").check()
