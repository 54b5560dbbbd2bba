"""Which policy losses are proportional to the advantages, as frameworks need that divide those."""

from typing import Any

import pytest

from composer_plugins.losses.choosing import choose
from composer_plugins.losses.folding import is_proportional

PROPORTIONAL: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("ppo", "grpo@verl", "sapo", "gspo", "gspo_token", "cispo", "vespo", "gmpo")),
    *((name, {}) for name in ("reinforce", "dppo_tv", "dppo_kl", "masked_is")),
    ("ipo", {"kl_tau": 0.0}),
    ("dro", {"beta": 0.0}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("dro", {"beta": 1e-3}),
    ("ipo", {}),
    ("dppo_tv@prime-rl", {}),
    ("masked_is", {"kl_tau": 1e-3}),
    ("kimi", {"ratio_low": 0.5, "ratio_high": 2.0, "tau": 1e-3}),
]


@pytest.mark.parametrize("name, params", PROPORTIONAL)
def test_a_loss_is_proportional_to_the_advantages(name: str, params: dict[str, Any]) -> None:
    assert is_proportional(choose("policy", name, params))


@pytest.mark.parametrize("name, params", OTHERS)
def test_a_loss_with_a_term_of_its_own_is_not(name: str, params: dict[str, Any]) -> None:
    assert not is_proportional(choose("policy", name, params))
