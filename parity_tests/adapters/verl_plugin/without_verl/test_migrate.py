"""`composer-plugins migrate --from verl`: what is said of configs in the style of verl's examples."""

from typing import Any

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import Key
from composer_plugins.objective.resolve import migrate, resolve
from parity_tests.cases.verl_config import changed

A, R, D = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "distillation.distillation_loss"
GRPO = {"algorithm.adv_estimator": "grpo", f"{R}.n": 8}
DR_GRPO = GRPO | {f"{A}.loss_agg_mode": "seq-mean-token-sum-norm", f"{A}.loss_scale_factor": 1024}
BYPASS = {f"{Key.CORRECTION}.bypass_mode": True}

# By name the config, and the word that is among the differences, or among the keys that are not looked at.
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo with a KL": (GRPO | {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.001}, ""),
    "dapo": (GRPO | {f"{A}.clip_ratio_high": 0.28, f"{A}.clip_ratio_c": 10.0}, ""),
    "dapo that drops groups": (GRPO | {Key.FILTER_GROUPS: True}, Key.FILTER_GROUPS),
    "dapo with an overlong buffer": (
        GRPO | {"reward_model.reward_kwargs.overlong_buffer_cfg": {"enable": True, "len": 4096}},
        "overlong_buffer_cfg.enable",
    ),
    "gspo": (GRPO | {Key.LOSS_MODE: "gspo", f"{A}.loss_agg_mode": "seq-mean-token-mean"}, ""),
    "dr_grpo": (DR_GRPO | {"algorithm.norm_adv_by_std_in_grpo": False}, ""),
    "rloo with the KL in the reward": ({"algorithm.adv_estimator": "rloo", Key.KL_IN_REWARD: True}, ""),
    "reinforce++": ({"algorithm.adv_estimator": "reinforce_plus_plus_baseline", f"{R}.n": 4}, ""),
    "token tis": (GRPO | {Key.CORRECTED: "token", Key.THRESHOLD: 2.0, Key.ROLLOUT_LOGPROBS: True}, ""),
    "rejection": (
        GRPO | {Key.REJECTED: "seq_mean_k1", f"{Key.REJECTED}_threshold": "0.99_1.001"},
        "rollout_rs",
    ),
    "bypass and an inert correction": (GRPO | BYPASS | {Key.CORRECTED: "sequence"}, Key.CORRECTED),
    "a loss type that nothing reads": (
        GRPO | BYPASS | {f"{Key.CORRECTION}.loss_type": "reinforce"},
        "loss_type",
    ),
    "a correction without log-probabilities": (
        GRPO | {Key.CORRECTED: "token", Key.ROLLOUT_LOGPROBS: False},
        Key.ROLLOUT_LOGPROBS,
    ),
    "distillation alone": (
        GRPO | {Key.DISTILLATION: True, Key.TASK_REWARDS: False},
        "sets the policy loss to 0",
    ),
    "distillation beside rewards": (GRPO | {Key.DISTILLATION: True}, Key.DISTILLATION),
    "an actor of the user's own": (
        GRPO | {f"{A}._target_": "recipe.gvpo.GvpoActorConfig"},
        "GvpoActorConfig",
    ),
    "an actor of another engine": (GRPO | {f"{A}._target_": "verl.workers.config.McoreActorConfig"}, ""),
    "a module of the user's own": (GRPO | {Key.EXTERNAL_LIB: "my_losses"}, "my_losses"),
    "an asynchronous trainer": (GRPO | {Key.TRAINER_MODE: "separate_async"}, "separate_async"),
    "a loss of multi-token prediction": (GRPO | {"actor_rollout_ref.model.mtp.enable_train": True}, "mtp"),
    "a KL to the model without its adapter": (
        GRPO | {f"{A}.use_kl_loss": True, "actor_rollout_ref.model.lora_adapter_path": "adapters/sft"},
        "adapters/sft",
    ),
    "options of a fork": (GRPO | {f"{A}.use_off_policy_loss": True}, "use_off_policy_loss"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_differs_only_where_nothing_does(name: str) -> None:
    """Read for verl and written for it again: what is named is all that its loss code reads beyond that."""
    changes, word = CONFIGS[name]
    read = resolve("verl", changed({}, changes))
    found = [str(difference) for difference in migrate(read.required(), "verl").differences] + [*read.unread]
    assert bool(found) == bool(word), found
    assert not word or any(word in line for line in found), found


@pytest.mark.parametrize(("rewards", "trains"), [({}, True), ({Key.TASK_REWARDS: False}, False)])
def test_a_distillation_takes_the_policy_loss_only_without_the_tasks_rewards(
    rewards: dict[str, Any], trains: bool
) -> None:
    """verl's default of `use_task_rewards` is True."""
    read = resolve("verl", changed({}, GRPO | {Key.DISTILLATION: True} | rewards)).required()
    assert bool(read.no_policy) is not trains


# Another package's loss `composer`, with its options where it reads them.
ACME = {**GRPO, Key.LOSS_MODE: "composer", "composer.clip_mode": "asymmetric", "composer.clip_high": 0.28}
MINE = (
    {"algorithm.composer.policy": "cispo"},
    {Key.LOSS_MODE: "composer/cispo"},
)


def test_nothing_is_claimed_of_another_packages_composer() -> None:
    with pytest.raises(ConfigError, match="so nothing says which loss 'composer' is"):
        resolve("verl", changed({}, ACME)).required()


@pytest.mark.parametrize("one", MINE, ids=lambda one: next(iter(one)))
def test_what_names_this_package_makes_composer_ours(one: dict[str, Any]) -> None:
    assert resolve("verl", changed({}, ACME | one)).required().policy.name == "cispo"
