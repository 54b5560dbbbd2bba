"""The kwargs are parsed once, each loss is looked up once, and a later call does neither."""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import drawn_inputs, packed
from parity_tests.support.prime_rl_doubles import GENERATIONS, inputs_of

OURS = ("/composer_plugins/", "/kernels/", "/adapters/")
USERS_LOSS = "parity_tests.support.prime_rl_users:users_loss"
KWARGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "parameters": {"policy": "cispo", "old_policy": "rollout", "policy_params": {"clip_high": 4.0}},
    "a dialect": {"policy": "ipo@prime-rl", "policy_params": {"tv_low": 0.3, "kl_tau": 0.0}},
    "an import path": {
        "policy": "parity_tests.support.prime_rl_users:users_loss",
        "policy_params": {"cap": 1.5},
    },
    "a correction": {"policy": "reinforce", "rollout_correction": "tis"},
    "a hint": {"hint_weight": 0.1, "hint_estimator": "k3"},
    "all channels": {"policy": "dppo_kl", "hint_weight": 0.1, "replay_weight": 1.0},
}
LOOKS_UP = {"find", "find_one", "ComposerConfig.parse", "parse", "registry"}


def calls(function: Callable[[], object]) -> Counter[str]:
    """How often each function of this package is called, or goes on as a generator."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_qualname
        is_ours = any(part in path for part in OURS) and "parity_tests" not in path
        if event == "call" and is_ours and not name.startswith("jaxtyped."):  # the checks of annotations
            found[f"choose {frame.f_locals['kind']}" if name == "choose" else name] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def inputs() -> Any:
    """One sequence with a reference, as PRIME-RL 0.8 has it."""
    sample = drawn_inputs(3, 12, spread=0.1)
    sample["reference"] = sample["trainer_logprobs"] - 0.1
    return inputs_of(GENERATIONS["v0.8.0"], packed([sample]), 0)


@pytest.mark.parametrize("name", KWARGS)
def test_the_first_call_parses_once_and_looks_up_each_loss_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = KWARGS[name]
    loss_fn(inputs(), **kwargs)  # what is kept for the whole process
    monkeypatch.setattr(prime_rl_plugin, "_losses", {})
    found = calls(lambda: loss_fn(inputs(), **kwargs))
    assert found["choose policy"] == 1
    assert {one: n for one, n in found.items() if one in LOOKS_UP or one.startswith("choose ")} == {
        **dict.fromkeys(("choose policy", "choose divergence", "ComposerConfig.parse", "parse"), 1),
        **({"choose correction": 1} if "rollout_correction" in kwargs else {}),
    }


@pytest.mark.parametrize("name", KWARGS)
def test_a_later_call_parses_nothing_and_looks_up_nothing(name: str) -> None:
    kwargs = KWARGS[name]
    loss_fn(inputs(), **kwargs)
    found = calls(lambda: loss_fn(inputs(), **kwargs))
    opened = ("choose ", "row_of", "ComposerConfig.", "Framework.", "Registry")
    assert not {one for one in found if one in LOOKS_UP or one.startswith(opened)}
    assert sum(found.values()) < 140, found.most_common(30)
