"""NeMo-RL itself, from a checkout: grpo@nemo-rl and its other losses equal ours with the same options."""

from typing import Any

import pytest
import torch

from composer_plugins.adapters.nemo_rl_loss.loss import ComposerLoss
from composer_plugins.conformance.claims import Claim
from composer_plugins.conformance.nemo_rl_claims import claims, upstream
from composer_plugins.conformance.nemo_rl_claims.upstream import Upstream
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.conformance.stubs import source
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.checkouts import checkout, with_checkout
from parity_tests.rigs.nemo_rl_doubles import counts, data

pytestmark = [with_checkout("nemo-rl"), pytest.mark.filterwarnings("ignore")]
LOADED = upstream.load(checkout("nemo-rl")) if source("nemo-rl") else None
CLAIMS = claims.claims(LOADED) if LOADED else []


@pytest.fixture
def nemo_rl() -> Upstream:
    """The checkout's modules."""
    assert LOADED is not None
    return LOADED


@pytest.mark.parametrize("claim", CLAIMS or [None], ids=str)
def test_the_loss_equals_nemo_rl(claim: Claim) -> None:
    row = compared(claim, CASES)
    assert row.status == "equal", row.note


def test_its_own_types_are_those_of_our_loss(nemo_rl: Upstream) -> None:
    interfaces: Any = nemo_rl.losses
    loss = ComposerLoss(policy="grpo@nemo-rl")
    assert loss.input_type is interfaces.LossInputType.LOGPROB
    assert loss.loss_type is interfaces.LossType.TOKEN_LEVEL
    config = interfaces.ClippedPGLossConfig()
    own = interfaces.ClippedPGLossFn(config)
    kept = {
        name: kind for name, kind in own.metric_normalizations.items() if name in loss.metric_normalizations
    }
    assert kept == dict(loss.metric_normalizations)


def test_its_packing_wrapper_adds_up_our_loss(nemo_rl: Upstream) -> None:
    """One call for each sequence, without its padding, and numbers as metrics."""
    logprobs, batch = data()
    lengths = torch.tensor([7, 5, 6, 7])
    for name in (
        "token_mask",
        "prev_logprobs",
        "generation_logprobs",
        "reference_policy_logprobs",
        "advantages",
    ):
        batch[name] = torch.where(torch.arange(7) < lengths.unsqueeze(-1), batch[name], 0.0)
    loss, totals = ComposerLoss(policy="gspo@nemo-rl", mode="seq-mean-token-mean"), counts(batch)

    def prepare(logits: Any, data: Any, **_: Any) -> Any:
        return {"next_token_logprobs": logits[:, :-1]}, data

    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = torch.cat(
        [torch.nn.functional.pad(x, (0, 1))[:n] for x, n in zip(logprobs, lengths, strict=True)]
    )
    wrapper = nemo_rl.wrapper.SequencePackingLossWrapper(loss, prepare, starts)
    got, metrics = wrapper(packed.unsqueeze(0), nemo_rl.data(batch), *totals)
    want, whole = loss(logprobs, batch, *totals)
    assert_parity(got, want, terms=24)
    gradients = [torch.autograd.grad(x, logprobs)[0] for x in (got, want)]
    assert_parity(gradients[0], gradients[1], terms=24, what="gradient")
    assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5) and metrics["num_valid_samples"] == 3


def test_a_planted_entry_of_the_table_is_found(nemo_rl: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ratio_clip_max were one more, as an option of another framework is, the claims would say so."""
    from dataclasses import replace

    from composer_plugins.frameworks.contract import Sets

    table = claims.NEMO_RL
    wrong = tuple(
        replace(one, sets=(Sets(("clip_low",)),)) if one.key == "loss_fn.ratio_clip_max" else one
        for one in table.options
    )
    monkeypatch.setattr(claims, "NEMO_RL", replace(table, options=wrong))
    row = compared(CLAIMS[0], CASES)
    assert row.status == "differs"
