"""`conform` calls PRIME-RL through the table that users run: a wrong entry of it is a row that differs."""

from collections.abc import Callable
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


OLD, V0_5, DEFAULT, IPO = ("0.4", "default"), ("0.5", "default"), ("0.8.1.dev52", "default"), ("0.6", "ipo")
EPS, NEWEST, ICEPOP = ("#3586", "ipo"), ("after #3586", "ipo"), ("#3526", "icepop")
PPO, CISPO = ("after #3586", "ppo"), ("after #3586", "cispo")
HALF = Conversion(factor=0.5)

# A wrong table, and the release and type of the claim that must show it.
PLANTED: dict[str, tuple[Place, Callable[[Place], Framework]]] = {
    "token_mask_high is the bound of a sequence's mean": (
        OLD,
        lambda at: sets(at, "token_mask_high", Sets(("geo_high",))),
    ),
    "geo_mask_low is the bound of a token": (OLD, lambda at: sets(at, "geo_mask_low", Sets(("token_low",)))),
    "teacher_tau weighs twice": (OLD, lambda at: option(at, "teacher_tau", conversion=HALF)),
    "ipo_mask_low is 0.02 by default": (V0_5, lambda at: option(at, "ipo_mask_low", default=0.02)),
    "the default of 0.5 is the later one": (V0_5, lambda at: loss(at, row="dppo_tv@prime-rl")),
    "dppo_mask_low is the upper bound": (
        DEFAULT,
        lambda at: sets(at, "dppo_mask_low", Sets(("tv_high",))),
    ),
    "the default is ipo": (DEFAULT, lambda at: loss(at, row="ipo@prime-rl")),
    "kl_tau is halved": (DEFAULT, lambda at: sets(at, "kl_tau", Sets(("kl_tau",), (), HALF))),
    "ipo_threshold is the upper bound alone": (
        IPO,
        lambda at: sets(at, "ipo_threshold", Sets(("tv_high",))),
    ),
    "adv_tau of ipo is its kl_tau": (IPO, lambda at: sets(at, "adv_tau", Sets(("kl_tau",)))),
    "#3586 does not change eps": (EPS, lambda at: option(at, "eps", default=0.1)),
    "#3586 does not change kl_tau": (EPS, lambda at: option(at, "kl_tau", default=1e-3)),
    "the newest ipo has a KL term": (NEWEST, lambda at: loss(at, params={})),
    "#3586 is as #3526": (EPS, lambda at: moved("#3586")),
    "icepop is ppo": (ICEPOP, lambda at: loss(at, row="ppo")),
    "ratio_low of ppo is a distance from 1": (
        PPO,
        lambda at: sets(at, "ratio_low", Sets(("clip_low",), (), SAME)),
    ),
    "ratio_high of cispo is a distance from 1": (
        CISPO,
        lambda at: sets(at, "ratio_high", Sets(("clip_high",), (), SAME)),
    ),
    "max_importance_ratio of ppo is a cap of the clipped ratio": (
        PPO,
        lambda at: sets(at, "max_importance_ratio", Sets(("ratio_cap",))),
    ),
    "adv_tau of ppo is halved": (PPO, lambda at: option(at, "adv_tau", conversion=HALF)),
}


def moved(until: str) -> Framework:
    """PRIME-RL in which the ipo of #3418 lasts one step longer, in the place of the one of #3586."""
    before, after = ([one for one in PRIME_RL.losses if is_at(one, (at, "ipo"))] for at in ("#3526", until))
    longer = before[0]._replace(until=after[0].until)
    losses = [longer if one is before[0] else one for one in PRIME_RL.losses if one is not after[0]]
    return replace(PRIME_RL, losses=tuple(losses))


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, wrong = PLANTED[name]
    since, kind = place

    def status() -> str:
        (claim,) = [one for one in claims.claims(DOUBLES[since]) if one.theirs == kind]  # type: ignore[arg-type]
        return compared(claim, CASES).status

    assert status() == "equal"
    for module in (claims, own_losses):
        monkeypatch.setattr(module, "PRIME_RL", wrong(place))
    assert status() == "differs"
