"""The kwargs are parsed once, each loss is looked up once, and a later call does neither."""

from types import FrameType
from typing import Any

import pytest

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import drawn_inputs
from composer_plugins.health.watch import FIRST_CALLS
from parity_tests.rigs.calls import calls, qualified
from parity_tests.rigs.prime_rl_doubles import sequence
from parity_tests.rigs.prime_rl_users import USERS

KWARGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "parameters": {"policy": "cispo", "old_policy": "rollout", "policy_params": {"clip_high": 4.0}},
    "a dialect": {"policy": "ipo@prime-rl", "policy_params": {"tv_low": 0.3, "kl_tau": 0.0}},
    "an import path": USERS,
    "a correction": {"policy": "reinforce", "rollout_correction": "tis"},
    "a hint": {"hint_weight": 0.1, "hint_estimator": "k3"},
    "all channels": {"policy": "dppo_kl", "hint_weight": 0.1, "replay_weight": 1.0},
}
LOOKS_UP = {"find", "find_one", "ComposerConfig.parse", "parse", "registry"}


def with_kind(frame: FrameType) -> str:
    """The name of a function, with the kind of loss that `choose` chooses, without checks of annotations."""
    name = qualified(frame)
    if name.startswith("jaxtyped."):
        return ""
    return f"choose {frame.f_locals['kind']}" if name == "choose" else name


def inputs() -> Any:
    """One sequence with a reference, as PRIME-RL 0.8 has it."""
    sample = drawn_inputs(3, 12, spread=0.1)
    sample["reference"] = sample["trainer_logprobs"] - 0.1
    return sequence(sample)


@pytest.mark.parametrize("name", KWARGS)
def test_the_first_call_parses_once_and_looks_up_each_loss_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = KWARGS[name]
    loss_fn(inputs(), **kwargs)  # what is kept for the whole process
    monkeypatch.setattr(prime_rl_plugin, "_losses", {})
    found = calls(lambda: loss_fn(inputs(), **kwargs), with_kind)
    assert found["choose policy"] == 1
    chosen = ["policy", "divergence", *(["correction"] if "rollout_correction" in kwargs else [])]
    by_path = ":" in kwargs.get("policy", "")  # `choose` finds the others by their name
    assert {one: n for one, n in found.items() if one in LOOKS_UP or one.startswith("choose ")} == {
        **dict.fromkeys(("ComposerConfig.parse", "parse", *(f"choose {kind}" for kind in chosen)), 1),
        "find": len(chosen) - by_path,
    }


@pytest.mark.parametrize("name", KWARGS)
def test_a_later_call_parses_nothing_and_looks_up_nothing(name: str) -> None:
    kwargs = KWARGS[name]
    for _ in range(FIRST_CALLS):  # each is measured, and of the later ones one of 8
        loss_fn(inputs(), **kwargs)
    found = calls(lambda: [loss_fn(inputs(), **kwargs) for _ in range(8)], with_kind)
    opened = ("choose ", "row_of", "ComposerConfig.", "Framework.", "Registry")
    assert not {one for one in found if one in LOOKS_UP or one.startswith(opened)}
    assert sum(found.values()) < 8 * 140 + 200, found.most_common(30)
