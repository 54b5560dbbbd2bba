"""A framework's own options of a loss, moved beside a loss of ours, are one error with a line to paste."""

from typing import Any

import pytest
import yaml

from composer_plugins.frameworks.skyrl import ALGORITHM, SKYRL
from composer_plugins.frameworks.trl import TRL
from composer_plugins.losses.choosing import find_one
from composer_plugins.objective.files import of_yaml
from composer_plugins.objective.options import as_yaml, not_read

HIGH, LOW, CAP = (f"{ALGORITHM}.{name}" for name in ("eps_clip_high", "eps_clip_low", "clip_ratio_c"))


def found(loss: str, moved: dict[str, Any], params: dict[str, Any] | None = None) -> list[str]:
    given = SKYRL, find_one(loss, "policy").loss, params or {}, moved
    return [str(one) for one in not_read(*given, lambda params: f"policy_params={as_yaml(params)}")]


def test_all_moved_options_are_one_error_with_one_line() -> None:
    (error,) = found("grpo", {LOW: 0.1, HIGH: 0.28, CAP: 10.0})
    assert error == (
        f"{LOW}, {HIGH}, {CAP}: SkyRL reads them for its own losses, and 'grpo' does not ({LOW}=0.1, "
        f"{HIGH}=0.28, {CAP}=10.0); remove them, and set "
        "policy_params={clip_low: 0.1, clip_high: 0.28, dual_clip: 10.0}"
    )
    assert found("grpo", {}) == []


def test_an_option_that_the_loss_has_no_parameter_for_is_removed() -> None:
    assert found("reinforce", {HIGH: 0.28})[0].endswith("'reinforce' does not (" + HIGH + "=0.28); remove it")


def test_a_named_parameter_stays_in_the_line() -> None:
    assert found("grpo", {HIGH: 0.28}, {"clip_high": 0.3, "clip_low": 0.1})[0].endswith(
        "set policy_params={clip_high: 0.3, clip_low: 0.1}"
    )


def test_the_value_is_converted_as_the_table_says() -> None:
    cispo = find_one("cispo", "policy").loss
    (error,) = not_read(TRL, cispo, {}, {"epsilon_high": 5.0}, lambda params: f"policy_params={dict(params)}")
    assert error.remedy == "remove it, and set policy_params={'clip_high': 4.0}"


@pytest.mark.parametrize("value", [3e-4, 1e-05, 0.28, 4.0, 1e16, -2.5e-7, 3, True, None, "none", [0.1, 2]])
def test_every_reader_of_yaml_takes_a_number_for_the_same(value: Any) -> None:
    text = as_yaml({"a": value})
    assert yaml.safe_load(text) == of_yaml(text) == {"a": value}
    assert type(yaml.safe_load(text)["a"]) is type(value)
