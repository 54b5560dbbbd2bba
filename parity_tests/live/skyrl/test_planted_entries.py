"""`conform` calls SkyRL through the table that users run: a wrong entry of it is a row that differs."""

from typing import Any

import pytest

from composer_plugins.adapters.skyrl_loss import options as skyrl_options
from composer_plugins.conformance.running import BROKEN, CASES, compared
from composer_plugins.conformance.skyrl_claims import policy, rest
from composer_plugins.conformance.skyrl_claims.suite import suite
from composer_plugins.frameworks.clips import HIGH, LOW
from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, Conversion, Framework, Sets
from composer_plugins.frameworks.skyrl import ALGORITHM, SKYRL, Key
from composer_plugins.losses.row import Kind
from parity_tests.rigs.claims import with_denominator, with_loss, with_sets

SUITE = suite()


def sets(key: str, *wrong: Sets, kind: Kind = "policy") -> Framework:
    return with_sets(SKYRL, f"{ALGORITHM}.{key}", *wrong, kind=kind)


def names(key: str, name: str, **wrong: Any) -> Framework:
    return with_loss(SKYRL, {key: name}, **wrong)


# A wrong table, and the name in SkyRL of the loss whose claim must show it.
PLANTED = {
    "eps_clip_low sets the upper bound": (sets("eps_clip_low", *HIGH), "regular"),
    "eps_clip_high sets the lower bound": (sets("eps_clip_high", *LOW), "gspo"),
    "clip_ratio_c is no second clip": (sets("clip_ratio_c"), "dual_clip"),
    "eps_clip_low of rollout_is is the bound of the ratio": (
        sets("eps_clip_low", Sets(("token_low",), ("masked_is",)), *LOW), "rollout_is"),
    "cispo_eps_clip_high is a cap of the ratio": (
        sets("cispo.cispo_eps_clip_high", Sets(("clip_high",), ("cispo",), MINUS_ONE)), "cispo"),
    "the two temperatures of sapo are exchanged": (sets("sapo.tau_pos", Sets(("tau_neg",))), "sapo"),
    "delta_low of dppo is 1 minus the bound": (
        sets("dppo.delta_low", Sets(("tv_low",), (), ONE_MINUS), Sets(("kl_low",))), "dppo"),
    "the bounds of clip_cov are exchanged": (
        sets("clip_cov.clip_cov_lb", Sets(("cov_high",), ("clip_cov",))), "clip_cov"),
    "ppo_kl_coef is no weight of kl_cov": (sets("kl_cov.ppo_kl_coef"), "kl_cov"),
    "grpo_norm_by_std False divides by the batch's deviation": (
        sets("grpo_norm_by_std", Sets(("scale",), ("grpo",), Conversion(values={False: "batch"})),
             kind="advantage"), "grpo"),
    "gamma is no discount": (sets("gamma", kind="advantage"), "reinforce++"),
    "lambd is 1 minus it": (sets("lambd", Sets(("lam",), (), ONE_MINUS), kind="advantage"), "gae"),
    "k3 is k1": (names(Key.KL_TYPE, "k3", row="k1@skyrl"), "k3"),
    "a mean over sequences is one over tokens": (
        with_denominator(SKYRL, "sequence_mean", "token-mean"), "sapo"),
    "a mean over prompts is one over tokens": (
        with_denominator(SKYRL, "prompt_mean", "token-mean"), "importance_sampling"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, theirs = PLANTED[name]
    claims = [one for one in SUITE.claims if one.theirs == theirs and SUITE.is_there(one.place)]
    assert {compared(one, CASES).status for one in claims} == {"equal"}
    for module in (policy, rest, skyrl_options):
        monkeypatch.setattr(module, "SKYRL", wrong)
    assert any(compared(one, CASES).status in BROKEN for one in claims)


@pytest.mark.parametrize("name, row", {"regular": "ppo", "gspo": "gspo", "dppo": "dppo_kl@skyrl"}.items())
def test_another_row_for_a_loss_is_a_row_that_differs(
    name: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = next(one for one in SKYRL.losses if one.options.get(Key.POLICY) == name)
    wrong = policy.claim(own._replace(row=row), None)
    claim = policy.Claim(
        "policy", row, name, wrong.place, policy.partial(policy.compare, own._replace(row=row))
    )
    assert compared(claim, CASES).status in BROKEN
