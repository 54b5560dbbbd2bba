"""`conform prime-rl` with our losses in the place of a checkout's own: a wrong table differs.

`adapters/prime_rl_plugin/test_live.py` makes the same comparison with a checkout, where one is given. Ours
equal its recorded numbers in `adapters/prime_rl_plugin/test_golden.py`, by the names in `prime_rl_words.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims import claims
from composer_plugins.conformance.running import CASES, compared
from composer_plugins.frameworks.contract import Conversion, Framework, Sets
from composer_plugins.frameworks.prime_rl import PRIME_RL
from parity_tests.rigs import prime_rl_doubles, prime_rl_words
from parity_tests.rigs.claims import with_loss


class Double:
    """PRIME-RL in the place of a checkout (`prime_rl_claims.upstream.Upstream`)."""

    compute_loss = staticmethod(prime_rl_doubles.compute_loss)

    def loss_fn(self, *, type: str, import_path: str = "", **options: Any) -> Callable[[Any], Any]:
        """The function for `[trainer.loss]`."""
        is_ours = type == "custom"
        return partial(loss_fn, **(options["kwargs"] if is_ours else prime_rl_words.kwargs_of(type, options)))


def option(kind: str, key: str, **wrong: Any) -> Framework:
    """PRIME-RL with another entry of an option of a loss."""
    (named,) = [one for one in PRIME_RL.losses if one.options["type"] == kind]
    own = tuple(replace(one, **wrong) if one.key == key else one for one in named.own)
    return with_loss(PRIME_RL, named.options, own=own)


def sets(kind: str, key: str, *wrong: Sets) -> Framework:
    return option(kind, key, sets=wrong)


HALF = Conversion(factor=0.5)
# The type of a claim, and a wrong table that it must show.
PLANTED: dict[str, tuple[str, Framework]] = {
    "dppo_mask_low is the upper bound": ("default", sets("default", "dppo_mask_low", Sets(("tv_high",)))),
    "dppo_mask_low is 0.02 by default": ("default", option("default", "dppo_mask_low", default=0.02)),
    "the default is ipo": ("default", with_loss(PRIME_RL, {"type": "default"}, row="ipo@prime-rl")),
    "kl_tau is halved": ("default", sets("default", "kl_tau", Sets(("kl_tau",), (), HALF))),
    "ipo_threshold is the upper bound alone": ("ipo", sets("ipo", "ipo_threshold", Sets(("tv_high",)))),
    "adv_tau of ipo is its kl_tau": ("ipo", sets("ipo", "adv_tau", Sets(("kl_tau",)))),
}


def test_every_loss_of_the_table_is_compared() -> None:
    compared_here = {kind for kind, _ in PLANTED.values()}
    assert {one.options["type"] for one in PRIME_RL.losses} == compared_here


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_entry_of_the_table_is_a_row_that_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, wrong = PLANTED[name]

    def status() -> str:
        (claim,) = [one for one in claims.claims(Double()) if one.theirs == kind]  # type: ignore[arg-type]
        return compared(claim, CASES).status

    assert status() == "equal"
    monkeypatch.setattr(claims, "PRIME_RL", wrong)
    assert status() == "differs"
