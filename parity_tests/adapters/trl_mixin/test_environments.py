"""The channels beside environments and custom rollouts: replayed pairs, multi-turn completions, masks."""

import json
from typing import Any

import pytest
import torch

from composer_plugins.errors import ComposerWarning
from parity_tests.rigs import tiny, tool_calls
from parity_tests.rigs.tool_calls import Hinting, Plain

pytestmark = pytest.mark.filterwarnings("ignore:You are using '(environment_factory|rollout_func)'")

PAIR = {"chosen": "3 it is.", "rejected": "8 it is."}
ROWS = [{"prompt": tool_calls.QUESTION, "start": i, **PAIR} for i in range(2)]
ADDS = "ignore:environment_factory. reset\\(\\) adds"


class Silent(Hinting):
    """Its reset adds nothing to the prompt."""

    def reset(self, **row: Any) -> None:  # type: ignore[override]
        """Begin anew."""
        super().reset(**row)


class Reading(Silent):
    """Has another tool."""

    def read(self, path: str) -> str:
        """Read a file.

        Args:
            path: the path of the file

        Returns:
            Its text.
        """
        return path


@pytest.fixture
def different_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The completions of a group are scripted, and equal ones have equal rewards."""
    monkeypatch.setattr(
        tiny, "reward", lambda completion_ids, **_: [i % 5 for i in range(len(completion_ids))]
    )


def trainer(environment: Any, rows: list[dict[str, Any]] = ROWS, **options: Any) -> Any:
    arguments = {"environment_factory": environment}
    return tool_calls.trainer(rows=rows, arguments=arguments, **{"replay_weight": 1.0, **options})


@pytest.mark.filterwarnings(ADDS)
@pytest.mark.parametrize("environment", [Plain, Silent])
def test_the_gradient_of_pairs_is_that_of_a_run_without_the_environment(environment: type) -> None:
    """Whatever reset adds to the policy's prompt: the pairs' prompt is the row's, with the same tools."""
    made = trainer(environment, policy_weight=0.0)
    arguments = {"tools": made.tools}
    alone = tool_calls.trainer(rows=ROWS, replay_weight=1.0, policy_weight=0.0, arguments=arguments)
    (expected,) = tiny.gradients(alone)
    (found,) = tiny.gradients(made)
    assert tiny.relative_difference(expected, found) <= 1e-6


@pytest.mark.filterwarnings(ADDS)
@pytest.mark.usefixtures("different_rewards")
def test_all_three_channels_with_an_environment_are_the_sum_of_each() -> None:
    hint = {"hint_source": "environment"}
    policy, hints, pairs, total = (
        tiny.gradients(trainer(Hinting, **options))[0]
        for options in (
            {"replay_weight": 0.0},
            {"replay_weight": 0.0, "policy_weight": 0.0, "hint_weight": 0.7, **hint},
            {"replay_weight": 0.3, "policy_weight": 0.0},
            {"replay_weight": 0.3, "hint_weight": 0.7, **hint},
        )
    )
    assert tiny.relative_difference(policy + hints + pairs, total) <= 1e-6


def test_what_reset_adds_to_the_prompt_of_pairs_is_a_warning() -> None:
    made = trainer(Plain)
    with pytest.warns(ComposerWarning, match=r"environment_factory: reset\(\) adds to the prompt of a"):
        tiny.batch(made)


@pytest.mark.filterwarnings("error:environment_factory")
def test_without_an_addition_or_without_a_pair_there_is_no_warning() -> None:
    tiny.batch(trainer(Silent))
    with_pair_where_reset_is_silent = [ROWS[0], {**ROWS[1], "chosen": None, "rejected": None, "start": 1}]
    tiny.batch(trainer(Partly, with_pair_where_reset_is_silent))


class Partly(Plain):
    """Its reset adds something in the second row."""

    def reset(self, **row: Any) -> str | None:  # type: ignore[override]
        """Begin anew."""
        return super().reset(**row) if row["start"] else None


def test_pairs_show_the_tools_of_their_rows_environment_unless_the_row_has_its_own() -> None:
    kinds = {"a": Silent, "b": Reading}
    rows = [{**ROWS[0], "environment": name, "tools": None} for name in ("a", "b")]
    rows += [{**ROWS[0], "environment": "a", "tools": json.dumps(tool_calls.READ)}]
    options = {"per_device_train_batch_size": 6, "num_generations": 2}
    made = trainer(kinds, rows, **options)
    inputs = tiny.batch(made)
    texts = sorted(
        ('"name": "guess"' in text, '"name": "read"' in text)
        for text in (tiny.shown(made, inputs, "replay_chosen", i) for i in range(6))
    )
    assert texts == [(False, True)] * 2 + [(True, False)] * 2 + [(True, True)] * 2


TURNS = [[5, 6, 7, 8, 9, 1], [4, 3, 10, 11, 1]]
OWN = [[1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1]]  # the tokens in the middle are the environment's


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Two turns of the policy with an answer of the environment between them."""
    pick = [i % 2 for i, _ in enumerate(prompts)]
    turns = {"completion_ids": [TURNS[i] for i in pick], "env_mask": [OWN[i] for i in pick]}
    return {**tiny.rollout(prompts, trainer), **turns}


@pytest.mark.usefixtures("different_rewards")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
@pytest.mark.parametrize("kind", ["environment", "rollout_func"])
def test_a_policy_of_ours_is_trls_on_the_tokens_that_the_policy_wrote(kind: str, loss_type: str) -> None:
    """In completions of several turns. The second step has ratios that are not 1."""

    def gradients(**options: Any) -> list[torch.Tensor]:
        options |= {"loss_type": loss_type, "max_steps": 2, "num_iterations": 2, "beta": 0.0}
        if kind == "environment":
            return tiny.gradients(trainer(Plain, replay_weight=0.0, **options))
        options |= {"max_completion_length": 8, "arguments": {"rollout_func": rollout}}
        return tiny.gradients(tiny.trainer(**options))

    for theirs, ours in zip(gradients(), gradients(policy="grpo"), strict=True):
        assert tiny.relative_difference(theirs, ours) <= 1e-6
