"""`conform` calls TRL through the table that users run: a wrong entry of it is a row that differs."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from composer_plugins.conformance.running import BROKEN, CASES, compared
from composer_plugins.conformance.trl_claims import policy
from composer_plugins.frameworks.contract import ONE_MINUS, SAME, Framework, Sets
from composer_plugins.frameworks.trl import CAPPED, CLIPPED, TRL


def sets(key: str, *wrong: Sets) -> Framework:
    """TRL with another meaning of an option."""
    assert TRL.option(key).sets != wrong
    return replace(
        TRL, options=tuple(replace(one, sets=wrong) if one.key == key else one for one in TRL.options)
    )


def names(row: str, **options: str) -> Framework:
    """TRL with another row for a loss of its own."""
    assert TRL.row_of(**options) not in (None, row)
    losses = tuple(one._replace(row=row) if one.options == options else one for one in TRL.losses)
    return replace(TRL, losses=losses)


def divides(loss_type: str, mode: str) -> Framework:
    """TRL with another denominator of a loss_type."""
    assert TRL.denominators[loss_type] != mode
    return replace(TRL, denominators={**TRL.denominators, loss_type: mode})


def token(loss_type: str) -> dict[str, str]:
    return {"loss_type": loss_type, "importance_sampling_level": "token"}


# A wrong table, and the loss_type and level of a claim that must show it.
PLANTED: dict[str, tuple[Callable[[], Framework], tuple[str, str]]] = {
    "epsilon sets the upper bound alone": (
        lambda: sets("epsilon", Sets(("clip_high",), CLIPPED)),
        ("grpo", "token"),
    ),
    "epsilon_high sets the lower bound": (
        lambda: sets("epsilon_high", Sets(("clip_low",), CLIPPED)),
        ("dapo", "token"),
    ),
    "epsilon_high of cispo is a distance from 1": (
        lambda: sets("epsilon_high", Sets(("clip_high",), (*CLIPPED, "cispo"), SAME)),
        ("cispo", "token"),
    ),
    "epsilon_high is 1 minus the bound": (
        lambda: sets("epsilon_high", Sets(("clip_high",), (*CLIPPED, "cispo"), ONE_MINUS)),
        ("cispo", "token"),
    ),
    "delta is no cap of gspo": (
        lambda: sets("delta", Sets(("ratio_cap",), tuple(x for x in CAPPED if x != "gspo"))),
        ("grpo", "sequence"),
    ),
    "the two temperatures of sapo are exchanged": (
        lambda: sets("sapo_temperature_pos", Sets(("tau_neg",), ("sapo",))),
        ("sapo", "token"),
    ),
    "k of vespo is its lambda": (
        lambda: sets("vespo_k_neg", Sets(("lambda_neg",), ("vespo",))),
        ("vespo", "token"),
    ),
    "luspo by sequence is grpo": (
        lambda: names("grpo@trl", loss_type="luspo", importance_sampling_level="sequence"),
        ("luspo", "sequence"),
    ),
    "sapo is cispo": (lambda: names("cispo@trl", **token("sapo")), ("sapo", "token")),
    "dr_grpo is a mean over tokens": (lambda: divides("dr_grpo", "token-mean"), ("dr_grpo", "token")),
    "dapo is a mean over completions": (lambda: divides("dapo", "seq-mean-token-mean"), ("dapo", "token")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, (loss_type, level) = PLANTED[name]
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    (claim,) = [one for one in policy.CLAIMS if one.place.options == options]
    assert compared(claim, CASES).status == "equal"
    monkeypatch.setattr(policy, "TRL", wrong())
    assert compared(claim, CASES).status in BROKEN
