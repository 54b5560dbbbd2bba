"""A clip bound that is far from every published one is a warning with the number and what it does."""

from typing import Any

import pytest

from composer_plugins.cli.recorded import examples
from composer_plugins.config import unlikely
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss
from parity_tests.rigs.every import row_id

SEQUENCE = "bounds the ratio of a sequence, a geometric mean over its tokens"
PAPERS = "set clip_low and clip_high as GSPO (3e-4 and 4e-4) or LUSPO (2e-3 and 2.5e-3)"
PERCENTAGE = "if it is a percentage (PPO: 0.2, DAPO: 0.28, DeepSeek-R1: 10)"
# The dialects whose own default is such a value: that of PPO's clip, as GSPO's clip and as the cap of cispo.
TRAPS = {"cispo@trl", "gspo@nemo-rl", "gspo@slime", "gspo@trl", "luspo@trl", "gspo_token@skyrl"}
TRAPS |= {"gspo_token@verl", "cispo@ms-swift", "gspo_token@ms-swift", "gspo_token@fireworks"}
TRAPS |= {"gspo@areal", "gspo@ms-swift", "gspo@openrlhf", "gspo@roll"}


@pytest.mark.parametrize(
    ("name", "params", "key", "words"),
    [
        ("grpo", {"clip_high": 28}, "clip_high", f"=28 clips the ratio only above 29*0.28 {PERCENTAGE}"),
        ("grpo", {"clip_low": 20}, "clip_low", "=20 does not clip the ratio from below*set 0.2 if*or 1"),
        ("ppo@verl", {"clip_high": 20.0}, "clip_high", f"clip_high=20 *set 0.2 {PERCENTAGE}"),
        ("cispo", {"clip_high": 28}, "clip_high", "clip_high=28 clips the ratio only above 29"),
        ("minirl", {"clip_low": 0.2, "clip_high": 28}, "clip_high", "=28 clips the ratio only above 29"),
        ("gspo", {"clip_high": 0.28}, "clip_high", f"clip_high=0.28 {SEQUENCE}*{PAPERS}"),
        ("gspo", {"clip_low": 0.2}, "clip_low", f"clip_low=0.2 {SEQUENCE}*{PAPERS}"),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, "clip_high", f"clip_high=0.2 {SEQUENCE}"),
        ("gspo_token", {"clip_high": 28}, "clip_high", f"clip_high=28 {SEQUENCE}"),
        ("luspo@trl", {}, "clip_high", f"clip_high=0.2 {SEQUENCE}"),
        ("cispo", {"clip_high": 0.28 - 1}, "clip_high", "clip_high=-0.72 caps every weight at 0.28, so the "
         "gradient of each on-policy token is multiplied by 0.28*set a number above 0*clip_high=4, which is"),
        ("cispo@trl", {}, "clip_high", "clip_high=-0.8 caps every weight at 0.2"),
    ],
)  # fmt: skip
def test_a_bound_that_hardly_anyone_intends_is_a_warning(
    name: str, params: dict[str, Any], key: str, words: str
) -> None:
    (found,) = unlikely(choose("policy", name, params, option="policy"))
    assert (found.severity, found.key) == ("warning", f"policy_params.{key}")
    assert all(part in str(found) for part in words.split("*")), found


@pytest.mark.parametrize(
    ("name", "params"),
    [
        *(("grpo", {"clip_high": value}) for value in (0.0, 3e-4, 0.2, 0.28, 1.0, 3.0, 10, 100, 1e4)),
        ("grpo", {"clip_low": 10, "clip_high": 10}),  # TRL's settings for DeepSeek-R1
        *(("gspo", {"clip_low": value, "clip_high": value}) for value in (0.0, 3e-4, 2.5e-3, 0.05)),
        ("gspo", {"clip_low": 1, "clip_high": 1e6}),  # no bound, on purpose
        *(("cispo", {"clip_high": value}) for value in (0.0, 0.2, 4.0, 7, 1e3)),
        ("cispo", {"clip_low": None}), ("cispo", {"clip_low": 10}),  # verl's example: no lower bound
        ("dppo_tv", {"tv_high": 28}), ("clip_cov", {"clip_low": 1, "clip_high": 1}),
    ],
)  # fmt: skip
def test_a_bound_that_somebody_uses_is_no_warning(name: str, params: dict[str, Any]) -> None:
    assert not list(unlikely(choose("policy", name, params)))


def test_a_lower_bound_above_the_upper_one_is_an_error() -> None:
    (found,) = unlikely(choose("policy", "cispo@trl", {"clip_low": 0.2}, option="policy"))
    assert found.severity == "error"
    problem = "policy_params.clip_low: clip_low=0.2 is a lower bound of 0.8, which is above"
    assert str(found).startswith(problem)
    assert "every weight is 0.2; set clip_low to at least 0.8, or clip_high" in str(found)


@pytest.mark.parametrize("loss", losses(), ids=row_id)
def test_no_default_is_a_warning_but_those_of_the_dialects_that_are_a_trap(loss: Loss) -> None:
    for name in (loss.name, *(f"{loss.name}@{dialect.upstream}" for dialect in loss.dialects)):
        assert bool([*unlikely(choose(loss.kind, name, examples(loss)))]) == (name in TRAPS), name
