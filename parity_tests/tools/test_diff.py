"""`composer-plugins diff` lists what differs, and nothing else."""

import json
from typing import Any

import pytest

from parity_tests.rigs.commands import output


def compared(*words: str) -> list[dict[str, Any]]:
    return json.loads(output("diff", *words, "--json"))


def test_two_dialects_differ_in_their_parameters_and_numbers() -> None:
    (one,) = compared("cispo@trl", "cispo@verl")
    assert one["differences"] == {
        "clip_low": {"cispo@trl": None, "cispo@verl": 0.2},
        "clip_high": {"cispo@trl": -0.8, "cispo@verl": 0.2},
        "log_ratio_clamp": {"cispo@trl": None, "cispo@verl": 20.0},
    }
    loss = {row["at"]: row["values"] for row in one["numbers"] if row["of"] == "loss"}
    assert loss["rollout 0 token 1"] == pytest.approx({"cispo@trl": 0.24, "cispo@verl": 0.96})
    assert len(loss) == 5  # all that are shown


def test_only_the_numbers_that_differ_are_listed() -> None:
    (one,) = compared("dapo", "grpo@trl")
    assert [*one["differences"]] == ["clip_high", "denominator"]
    assert one["differences"]["denominator"] == {"dapo": "token-mean", "grpo@trl": "seq-mean-token-mean"}
    assert [(row["of"], row["at"]) for row in one["numbers"]] == [("loss", "rollout 0 token 2")]
    lines = output("diff", "dapo", "grpo@trl").rstrip().splitlines()
    assert lines[-1].split() == ["rollout", "0", "token", "2", "-1.28", "-1.2"]


def test_equal_numbers_of_different_denominators_are_said_to_be_equal() -> None:
    assert output("diff", "grpo@oat", "grpo@areal").rstrip().endswith("on the worked example are equal.")


def test_a_parameter_that_one_lacks_is_not_none() -> None:
    (one,) = compared("cispo", "dapo")
    assert one["differences"]["dual_clip"] == {"dapo": None}
    row = next(line for line in output("diff", "cispo", "dapo").splitlines() if "dual_clip" in line)
    assert row.split() == ["dual_clip", "not", "there", "None"]
    assert one["differences"]["gradient"]["dapo"] == "the derivative of the value"


def test_inputs_that_differ_are_listed() -> None:
    (one,) = compared("dpo", "simpo")
    assert one["differences"]["inputs"]["simpo"] == "chosen, rejected"
    assert one["differences"]["scores"] == {"dpo": "sums over tokens", "simpo": "averages over tokens"}


@pytest.mark.parametrize("pair", [("grpo@trl", "grpo@oat", "--kind", "policy"), ("gspo", "gspo")])
def test_it_says_so_where_nothing_differs(pair: tuple[str, ...]) -> None:
    (one,) = compared(*pair)
    assert one["differences"] == {} and one["numbers"] == []
    assert "Nothing differs: they take the same" in output("diff", *pair, columns=80)


def test_an_example_value_of_a_required_parameter_is_named() -> None:
    (one,) = compared("seq-mean-token-sum-norm", "seq-mean-token-sum-norm@verl")
    assert one["examples"] == {"seq-mean-token-sum-norm": {"max_length": 4}}
    page = " ".join(output("diff", "seq-mean-token-sum-norm", "seq-mean-token-sum-norm@verl").split())
    assert "The numbers of seq-mean-token-sum-norm are with max_length=4: it has no default" in page


def test_names_of_two_kinds_are_compared_in_each() -> None:
    assert [one["kind"] for one in compared("grpo", "dr_grpo")] == ["policy", "advantage"]
    assert [one["kind"] for one in compared("grpo", "ppo")] == ["policy"]
    assert [one["kind"] for one in compared("grpo", "rloo", "--kind", "advantage")] == ["advantage"]
