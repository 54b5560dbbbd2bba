"""A metric is a mean over the tokens, rows or pairs of all that is logged together, and a loss over steps."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from composer_plugins.kernels.policy import grpo
from composer_plugins.kernels.types import Metric, TokenLoss
from parity_tests.rigs import sharded, tiny

pytestmark = pytest.mark.filterwarnings("ignore:loss_type. it has no effect")

SEEN: list[Tensor] = []  # the unmasked values of each call of `placed`


def placed(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """GRPO, with a metric of which each token of a completion has another value."""
    token = grpo(logprobs, old_logprobs, advantages, mask)
    places = mask.cumsum(1).float()
    SEEN.append(places[mask])
    return TokenLoss(token.loss, {"place": Metric(places, mask)})


def test_a_metric_is_a_mean_over_the_tokens_of_micro_batches_and_steps() -> None:
    """Of two steps of four micro-batches; in the evaluation after them, of its batches."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2}
    options |= {
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
    }
    arguments = {"eval_dataset": Dataset.from_list(tiny.rows()[:3]), "rollout_func": tiny.rollout}
    made = tiny.trainer(policy=f"{__name__}:placed", arguments=arguments, **options)
    SEEN.clear()
    made.train()
    for name, calls in (("composer/policy/place", SEEN[:8]), ("eval_composer/policy/place", SEEN[8:])):
        (found,) = (entry[name] for entry in made.state.log_history if name in entry)
        assert found == pytest.approx(float(torch.cat(calls).mean()), rel=1e-6)
        assert found != pytest.approx(float(torch.stack([one.mean() for one in calls]).mean()), rel=1e-3)


def test_metrics_do_not_depend_on_gradient_accumulation() -> None:
    """Of all channels; the ratios of the second update of the rollouts are not 1."""
    case = {**sharded.ALL, "max_steps": 2, "num_iterations": 2, "adam_epsilon": 1.0, "learning_rate": 0.05}
    logged = []
    for count in (1, 4):
        sizes = {"per_device_train_batch_size": 16 // count, "gradient_accumulation_steps": count}
        made = tiny.trainer(**case, **sizes)
        made.train()
        logged.append({k: v for k, v in made.state.log_history[1].items() if k.startswith("composer/")})
    assert len(logged[0]) > 8 and logged[0]["composer/policy/ratio"] != 1
    assert logged[1] == pytest.approx(logged[0], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        *({"policy": name} for name in sharded.POLICIES),
        {"policy": "grpo", "loss_type": "bnpo"},
        {"policy_weight": 0.0, "hint_weight": 1.0, "loss_type": "grpo"},
        {"policy_weight": 0.0, "replay_weight": 1.0, "loss_type": "grpo"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_channels_loss_adds_up_to_the_loss_of_the_step(options: dict[str, Any]) -> None:
    """As TRL logs it: over two steps, of four micro-batches and of two, which ends the epoch."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    epoch = {"dataset": tiny.rows(6), "max_steps": -1, "num_train_epochs": 1, "logging_steps": 2}
    made = tiny.trainer(**options, **sizes, **epoch)
    made.train()
    entry = made.state.log_history[0]
    assert made.state.global_step == 2
    (channel,) = (x for name, x in entry.items() if name.startswith("composer/") and name.endswith("/loss"))
    assert channel == pytest.approx(entry["loss"], rel=1e-5, abs=1e-7)
