"""TRL's own losses by their dialects here, through a real GRPOTrainer: the same gradients."""

from typing import Any

import pytest

from composer_plugins.errors import ConfigError
from parity_tests.adapters.trl.test_bad_input import config
from parity_tests.support import tiny

FLOAT32 = 1e-6  # as in test_trl_equality


@pytest.mark.parametrize(
    ("policy", "denominator", "theirs"),
    [
        ("grpo@trl", "grpo", {"loss_type": "grpo"}),
        ("cispo@trl", "dapo", {"loss_type": "cispo"}),
        ("sapo@trl", "grpo", {"loss_type": "sapo"}),
        ("vespo@trl", "dapo", {"loss_type": "vespo"}),
        ("luspo@trl", "luspo", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
        ("gspo@trl", "grpo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ],
)
def test_a_dialect_trains_as_trls_own_loss_type(
    policy: str, denominator: str, theirs: dict[str, Any]
) -> None:
    # Two steps: in the second the ratios have left 1, and a third would multiply the first's rounding.
    options = {"max_steps": 2, "num_iterations": 2, "learning_rate": 3e-2}
    own = tiny.gradients(tiny.trainer(**options, **theirs))
    ours = tiny.gradients(tiny.trainer(**options, policy=policy, loss_type=denominator))
    assert max(map(tiny.relative_difference, own, ours)) <= FLOAT32


def test_a_parameter_of_ones_own_stands_over_the_dialects() -> None:
    assert config(policy="cispo@trl").policy_choice().params == {"clip_high": -0.8}
    made = config(policy="cispo@trl", policy_params={"clip_high": 4.0})
    assert made.policy_choice().params == {"clip_high": 4.0}
    assert config(policy="grpo@trl", epsilon_high=0.28).policy_choice().params["clip_high"] == 0.28


def test_an_unknown_dialect_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown dialect 'cispo@tlr': did you mean 'cispo@trl'"):
        config(policy="cispo@tlr")
    with pytest.raises(ConfigError, match="unknown dialect 'jsd@prime'; known: "):
        config(hint_divergence="jsd@prime")


def test_a_loss_that_trl_cannot_feed_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="'dppo_topk_tv' needs topk_logprobs, .*, which TRL"):
        config(policy="dppo_topk_tv")
    with pytest.raises(ConfigError, match="needs .*, which TRL's trainer does not have"):
        config(replay_loss="kto")
    for options in ({"policy": "kl_cov"}, {"replay_loss": "aot"}):
        with pytest.raises(ConfigError, match="is a statistic of the whole batch, which TRL cuts into"):
            config(**options)


def test_a_hint_over_more_entries_than_the_vocabulary_has_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="jsd's parameter 'top_k' is 9999, and the vocabulary has"):
        tiny.trainer(hint_weight=1.0, hint_params={"top_k": 9999})
    tiny.trainer(hint_weight=1.0, hint_params={"top_k": 4, "top_k_of": "student", "rest": "tail"}).train()
