"""TRL's own losses by their dialects here, through a real GRPOTrainer: the same gradients."""

from typing import Any

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.findings import ComposerWarning
from parity_tests.adapters.trl_mixin.test_bad_input import config
from parity_tests.rigs import tiny

FLOAT32 = 1e-6  # as in test_equality


@pytest.mark.filterwarnings("ignore:policy_params.clip_high:composer_plugins.findings.ComposerWarning")
@pytest.mark.parametrize(
    ("policy", "theirs"),
    [
        ("grpo@trl", {"loss_type": "grpo"}),
        ("dapo@trl", {"loss_type": "dapo"}),
        ("dr_grpo@trl", {"loss_type": "dr_grpo"}),
        ("cispo@trl", {"loss_type": "cispo"}),
        ("sapo@trl", {"loss_type": "sapo"}),
        ("vespo@trl", {"loss_type": "vespo"}),
        ("luspo@trl", {"loss_type": "luspo", "importance_sampling_level": "sequence"}),
        ("gspo@trl", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ],
)
def test_a_dialect_trains_as_trls_own_loss_type(policy: str, theirs: dict[str, Any]) -> None:
    """With loss_type not set, the denominator is TRL's too."""
    # Two steps: in the second the ratios have left 1, and a third would multiply the first's rounding.
    options = {"max_steps": 2, "num_iterations": 2, "learning_rate": 3e-2}
    own = tiny.gradients(tiny.trainer(**options, **theirs))
    ours = tiny.gradients(tiny.trainer(**options, policy=policy))
    assert max(map(tiny.relative_difference, own, ours)) <= FLOAT32


def test_a_dialect_of_another_upstream_has_that_upstreams_denominator() -> None:
    """verl divides by tokens unless loss_agg_mode is set."""
    made = config(policy="grpo@verl")
    assert made.resolved[2:4] == ("token-mean", "as in verl: loss_type is not set")


def test_a_parameter_of_ones_own_stands_over_the_dialects() -> None:
    with pytest.warns(ComposerWarning, match="policy_params.clip_high: .* caps every weight at 0.2, so"):
        made = config(policy="cispo@trl")
    assert made.resolved.policy.params == {"clip_high": -0.8}
    made = config(policy="cispo@trl", policy_params={"clip_high": 4.0})
    assert made.resolved.policy.params == {"clip_high": 4.0}
    assert config(policy="grpo@trl", epsilon_high=0.28).resolved.policy.params["clip_high"] == 0.28


def test_a_loss_that_trl_cannot_run_is_refused() -> None:
    for options, key in (
        (
            {"policy": "dppo_topk_tv"},
            "policy: 'dppo_topk_tv' needs topk_logprobs, .*, which trl does not provide",
        ),
        ({"replay_loss": "kto", "replay_weight": 1.0}, "replay_loss: 'kto' needs "),
        ({"policy": "kl_cov"}, "policy: 'kl_cov' is a statistic of the whole batch, and TRL cuts"),
        (
            {"replay_loss": "aot", "replay_weight": 1.0},
            "replay_loss: 'aot' is a statistic of the whole batch, and TRL cuts",
        ),
    ):
        with pytest.raises(ConfigError, match=key):
            config(**options)


def test_a_hint_over_more_entries_than_the_vocabulary_has_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="hint_params.top_k: 9999 is more than the 28"):
        tiny.trainer(hint_weight=1.0, hint_params={"top_k": 9999})
    tiny.trainer(hint_weight=1.0, hint_params={"top_k": 4, "top_k_of": "student", "rest": "tail"}).train()
