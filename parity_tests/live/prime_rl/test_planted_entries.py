"""`conform` calls PRIME-RL through the table that users run: a wrong entry of it is a row that differs."""

from dataclasses import replace
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin import own_losses
from composer_plugins.conformance.prime_rl_claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.contract import SAME, Conversion, Framework, NamedLoss, Sets
from composer_plugins.frameworks.prime_rl import PRIME_RL
from parity_tests.rigs.prime_rl_formulas import DOUBLES

pytestmark = pytest.mark.filterwarnings(
    "ignore:prime-rl. it is newer than the newest", "ignore:.*multiplies the advantages with the hint"
)
Place = tuple[str, str]  # a release, and the type of a loss that it has


def is_at(one: NamedLoss, place: Place) -> bool:
    return one.options["type"] == place[1] and place[0] in PRIME_RL.releases_of(one)


def loss(place: Place, **wrong: Any) -> Framework:
    """PRIME-RL with another entry of a loss."""
    found = tuple(one._replace(**wrong) if is_at(one, place) else one for one in PRIME_RL.losses)
    assert found != PRIME_RL.losses
    return replace(PRIME_RL, losses=found)


def option(place: Place, key: str, **wrong: Any) -> Framework:
    """PRIME-RL with another entry of an option of a loss."""
    (named,) = [one for one in PRIME_RL.losses if is_at(one, place)]
    return loss(place, own=tuple(replace(one, **wrong) if one.key == key else one for one in named.own))


def sets(place: Place, key: str, *wrong: Sets) -> Framework:
    return option(place, key, sets=wrong)


def moved() -> Framework:
    """PRIME-RL in which the ipo of #3418 lasts one step longer, in the place of the one of #3586."""
    before, after = ([one for one in PRIME_RL.losses if is_at(one, (at, "ipo"))] for at in ("#3526", "#3586"))
    longer = before[0]._replace(until=after[0].until)
    losses = [longer if one is before[0] else one for one in PRIME_RL.losses if one is not after[0]]
    return replace(PRIME_RL, losses=tuple(losses))


OLD, V0_5, DEFAULT, IPO = ("0.4", "default"), ("0.5", "default"), ("0.8.1.dev52", "default"), ("0.6", "ipo")
EPS, NEWEST, ICEPOP = ("#3586", "ipo"), ("after #3586", "ipo"), ("#3526", "icepop")
PPO, CISPO = ("after #3586", "ppo"), ("after #3586", "cispo")
HALF = Conversion(factor=0.5)

# The release and type of a claim, and a wrong table that it must show.
PLANTED: dict[str, tuple[Place, Framework]] = {
    "token_mask_high is the bound of a sequence's mean": (
        OLD, sets(OLD, "token_mask_high", Sets(("geo_high",)))),
    "geo_mask_low is the bound of a token": (OLD, sets(OLD, "geo_mask_low", Sets(("token_low",)))),
    "teacher_tau weighs twice": (OLD, option(OLD, "teacher_tau", conversion=HALF)),
    "ipo_mask_low is 0.02 by default": (V0_5, option(V0_5, "ipo_mask_low", default=0.02)),
    "the default of 0.5 is the later one": (V0_5, loss(V0_5, row="dppo_tv@prime-rl")),
    "dppo_mask_low is the upper bound": (DEFAULT, sets(DEFAULT, "dppo_mask_low", Sets(("tv_high",)))),
    "the default is ipo": (DEFAULT, loss(DEFAULT, row="ipo@prime-rl")),
    "kl_tau is halved": (DEFAULT, sets(DEFAULT, "kl_tau", Sets(("kl_tau",), (), HALF))),
    "ipo_threshold is the upper bound alone": (IPO, sets(IPO, "ipo_threshold", Sets(("tv_high",)))),
    "adv_tau of ipo is its kl_tau": (IPO, sets(IPO, "adv_tau", Sets(("kl_tau",)))),
    "#3586 does not change eps": (EPS, option(EPS, "eps", default=0.1)),
    "#3586 does not change kl_tau": (EPS, option(EPS, "kl_tau", default=1e-3)),
    "the newest ipo has a KL term": (NEWEST, loss(NEWEST, params={})),
    "#3586 is as #3526": (EPS, moved()),
    "icepop is ppo": (ICEPOP, loss(ICEPOP, row="ppo")),
    "ratio_low of ppo is a distance from 1": (PPO, sets(PPO, "ratio_low", Sets(("clip_low",), (), SAME))),
    "ratio_high of cispo is a distance from 1": (
        CISPO, sets(CISPO, "ratio_high", Sets(("clip_high",), (), SAME))),
    "max_importance_ratio of ppo is a cap of the clipped ratio": (
        PPO, sets(PPO, "max_importance_ratio", Sets(("ratio_cap",)))),
    "adv_tau of ppo is halved": (PPO, option(PPO, "adv_tau", conversion=HALF)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wrong = PLANTED[name]
    since, kind = place

    def status() -> str:
        (claim,) = [one for one in claims.claims(DOUBLES[since]) if one.theirs == kind]  # type: ignore[arg-type]
        return compared(claim, CASES).status

    assert status() == "equal"
    for module in (claims, own_losses):
        monkeypatch.setattr(module, "PRIME_RL", wrong)
    assert status() == "differs"
