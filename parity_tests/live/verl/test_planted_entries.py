"""`conform` calls verl through the table that users run: a wrong entry of it is a row that differs."""

from typing import Any

import pytest

from composer_plugins.conformance.running import BROKEN, CASES, compared
from composer_plugins.conformance.verl_claims import (
    advantages,
    distillation,
    policy,
    reduction,
    token_advantages,
    upstream,
)
from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, Conversion, Framework, Sets
from composer_plugins.frameworks.verl import CHOOSES, HIGH, LOW, VERL
from composer_plugins.losses.row import Kind
from parity_tests.rigs.claims import with_denominator, with_loss, with_sets

MODULES = (advantages, distillation, policy, reduction, token_advantages, upstream)
CLAIMS = [claim for module in MODULES for claim in getattr(module, "CLAIMS", ())]


def sets(key: str, *wrong: Sets, kind: Kind = "policy") -> Framework:
    return with_sets(VERL, key, *wrong, kind=kind)


def names(kind: Kind, name: str, **wrong: Any) -> Framework:
    return with_loss(VERL, {CHOOSES[kind]: name}, **wrong)


BY_GROUP = Sets(("scale",), ("grpo", "pass_at_k"), Conversion(values={False: "group"}))

# A wrong table, and the name in verl of the loss whose claim must show it.
PLANTED = {
    "clip_ratio_low sets the upper bound": (sets("clip_ratio_low", *HIGH), "vanilla"),
    "clip_ratio_high sets the lower bound": (sets("clip_ratio_high", *LOW), "gspo"),
    "clip_ratio_high of cispo is a cap of the ratio": (
        sets("clip_ratio_high", Sets(("clip_high",), ("cispo",), MINUS_ONE), *HIGH), "cispo"),
    "clip_ratio_low of dppo_tv is 1 minus the bound": (
        sets("clip_ratio_low", Sets(("tv_low",), (), ONE_MINUS), *LOW), "dppo_tv"),
    "clip_ratio_low is no bound of dppo_kl": (sets("clip_ratio_low", *LOW[:2]), "dppo_kl"),
    "clip_ratio_c is no second clip": (sets("clip_ratio_c"), "vanilla"),
    "clip_ratio_c is no cap of dppo_tv": (
        sets("clip_ratio_c", Sets(("ratio_cap",), ("dppo_kl",))), "dppo_tv"),
    "the two temperatures of sapo are exchanged": (sets("tau_pos", Sets(("tau_neg",))), "sapo"),
    "dro_beta is twice its beta": (
        sets("policy_loss.dro_beta", Sets(("beta",), ("dro",), Conversion(2.0))), "dro"),
    "the bounds of clip_cov are exchanged": (
        sets("policy_loss.clip_cov_lb", Sets(("cov_high",), ("clip_cov",))), "clip_cov"),
    "ppo_kl_coef is no weight of kl_cov": (sets("policy_loss.ppo_kl_coef"), "kl_cov"),
    "norm_adv_by_std_in_grpo False divides by the batch's deviation": (
        sets("norm_adv_by_std_in_grpo", BY_GROUP, kind="advantage"), "grpo_passk"),
    "gamma is no discount": (sets("gamma", kind="advantage"), "reinforce_plus_plus"),
    "lam is 1 minus it": (sets("lam", Sets(("lam",), (), ONE_MINUS), kind="advantage"), "gae"),
    "gspo is GSPO of the paper": (names("policy", "gspo", row="gspo"), "gspo"),
    "sapo follows loss_agg_mode": (names("policy", "sapo", mode=""), "sapo"),
    "geo_mean is a mean over tokens": (names("policy", "geo_mean", mode="token-mean"), "geo_mean"),
    "rloo_vectorized is rloo": (names("advantage", "rloo_vectorized", row="rloo@verl"), "rloo_vectorized"),
    "low_var_kl is k1": (names("kl", "low_var_kl", row="k1@verl"), "low_var_kl"),
    "mse of the distillation is k1": (names("kl", "mse", row="k1@verl"), "distillation mse"),
    "token-sum is a mean": (with_denominator(VERL, "token-sum", "token-mean"), "token-sum"),
    "a mean over sequences is one over tokens": (
        with_denominator(VERL, "seq-mean-token-sum", "seq-mean-token-mean"), "gpg"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, theirs = PLANTED[name]
    claims = [one for one in CLAIMS if one.theirs == theirs]
    assert {compared(one, CASES).status for one in claims} == {"equal"}
    for module in MODULES:
        if hasattr(module, "VERL"):
            monkeypatch.setattr(module, "VERL", wrong)
    assert any(compared(one, CASES).status in BROKEN for one in claims)
