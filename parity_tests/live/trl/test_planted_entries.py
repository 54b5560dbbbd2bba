"""`conform` calls TRL through the table that users run: a wrong entry of it is a row that differs."""

import pytest

from composer_plugins.conformance.running import BROKEN, CASES, compared
from composer_plugins.conformance.trl_claims import policy
from composer_plugins.frameworks.contract import ONE_MINUS, SAME, Framework, Sets
from composer_plugins.frameworks.trl import CAPPED, CLIPPED, TRL
from parity_tests.rigs.claims import with_denominator, with_loss, with_sets


def chosen(loss_type: str, level: str = "token") -> dict[str, str]:
    """TRL's options that choose a loss."""
    return {"loss_type": loss_type, "importance_sampling_level": level}


def sets(key: str, *wrong: Sets) -> Framework:
    return with_sets(TRL, key, *wrong)


# A wrong table, and the options of a claim that must show it.
PLANTED = {
    "epsilon sets the upper bound alone": (
        sets("epsilon", Sets(("clip_high",), CLIPPED)), chosen("grpo")),
    "epsilon_high sets the lower bound": (
        sets("epsilon_high", Sets(("clip_low",), CLIPPED)), chosen("dapo")),
    "epsilon_high of cispo is a distance from 1": (
        sets("epsilon_high", Sets(("clip_high",), (*CLIPPED, "cispo"), SAME)), chosen("cispo")),
    "epsilon_high is 1 minus the bound": (
        sets("epsilon_high", Sets(("clip_high",), (*CLIPPED, "cispo"), ONE_MINUS)), chosen("cispo")),
    "delta is no cap of gspo": (
        sets("delta", Sets(("ratio_cap",), tuple({*CAPPED} - {"gspo"}))), chosen("grpo", "sequence")),
    "the two temperatures of sapo are exchanged": (
        sets("sapo_temperature_pos", Sets(("tau_neg",), ("sapo",))), chosen("sapo")),
    "k of vespo is its lambda": (
        sets("vespo_k_neg", Sets(("lambda_neg",), ("vespo",))), chosen("vespo")),
    "luspo by sequence is grpo": (
        with_loss(TRL, chosen("luspo", "sequence"), row="grpo@trl"), chosen("luspo", "sequence")),
    "sapo is cispo": (with_loss(TRL, chosen("sapo"), row="cispo@trl"), chosen("sapo")),
    "dr_grpo is a mean over tokens": (with_denominator(TRL, "dr_grpo", "token-mean"), chosen("dr_grpo")),
    "dapo is a mean over completions": (with_denominator(TRL, "dapo", "seq-mean-token-mean"), chosen("dapo")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, options = PLANTED[name]
    (claim,) = [one for one in policy.CLAIMS if one.place.options == options]
    assert compared(claim, CASES).status == "equal"
    monkeypatch.setattr(policy, "TRL", wrong)
    assert compared(claim, CASES).status in BROKEN
