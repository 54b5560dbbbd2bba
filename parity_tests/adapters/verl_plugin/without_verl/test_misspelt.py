"""Keys that verl does not have: which of its keys is meant, and what hydra's override should have been."""

from typing import Any

import pytest

from composer_plugins.adapters.verl_plugin.doctor import misspelt

OWN: dict[str, Any] = {
    "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "composer": None, "kl_ctrl": {"kl_coef": 0.001}},
    "actor_rollout_ref": {
        "actor": {
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.2,
            "kl_loss_coef": 0.001,
            "policy_loss": {"loss_mode": "vanilla", "composer": None},
        },
        "rollout": {"n": 1, "temperature": 1.0, "val_kwargs": {"n": 1}, "engine_kwargs": {}},
    },
    "data": {"train_files": "a", "max_response_length": 512},
    "ray_kwargs": {"ray_init": {"num_cpus": None}},
}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor_rollout_ref.actor.clip_ratio_hgh", "actor_rollout_ref.actor.clip_ratio_high"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("algorithm.composr.hint_weight", "algorithm.composer.hint_weight"),
        ("algoritm.gamma", "algorithm.gamma"),
        ("algorithm.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio_high"),  # of another table
        ("actor_rollout_ref.actor.n", ""),  # of two other tables
        ("actor_rollout_ref.actor.kl_coef", ""),  # the one that verl has is a KL in the reward
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("composer", "algorithm.composer"),
        ("algorithm.mine", ""),
        ("algorithm.adv_estimator", ""),
        ("algorithm.composer.hint_wieght", ""),  # an option of ours, which other rules examine
        ("actor_rollout_ref.rollout.engine_kwargs.vllm", ""),  # a table that takes every key
        ("actor_rollout_ref.rollout.max_temperature", ""),  # another word before a name of verl's
        ("actor_rollout_ref.actor.use_off_policy_loss", ""),
        ("actor_rollout_ref.rollout.seed", ""),  # of verl 0.9, which these own options are not
        ("data.train_files_path.n", ""),
    ],
)
def test_the_nearest_key_is_verls(key: str, meant: str) -> None:
    assert misspelt.nearest(key, OWN) == meant
    assert misspelt.nearest(key, {}) == ""


def test_without_a_guess_the_keys_that_have_it_in_their_names_are_listed() -> None:
    config: dict[str, Any] = {"actor_rollout_ref": {"actor": {"kl_loss": 1, "policy_loss": {"mode": "gspo"}}}}
    one, other = misspelt.misspelt(config, OWN)
    assert "verl has kl_loss_coef" in one.remedy and "verl has loss_mode" in other.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.policy_los", True),
        ("algorithm.gama", "high"),
        ("algorithm.gama", True),
        ("data.max_respones_length", [1]),
    ],
)
def test_a_key_whose_value_has_another_type_is_not_meant(key: str, value: Any) -> None:
    assert misspelt.nearest(key, OWN) and not misspelt.nearest(key, OWN, value)


def test_a_key_that_verl_does_not_have_is_a_warning_but_not_a_users_table() -> None:
    config = {
        "algorithm": {"adv_estimater": "composer", "mine": 1, "composer": {"hint_wieght": 1}},
        "actor_rollout_ref": {"rollout": {"temprature": 0.7, "engine_kwargs": {"temprature": 1}}},
        "data": {"max_respones_length": 8, "train_files": {"a": 1}},
        "dta": {},
        "sdpo": {},
        "ray_kwargs": {"ray_init": {"num_gpus": 1}},
        "trainer": 3,
    }
    found = {one.key: one for one in misspelt.misspelt(config, OWN)}
    assert found.keys() == {
        "algorithm.adv_estimater",
        "algorithm.mine",
        "actor_rollout_ref.rollout.temprature",
        "data.max_respones_length",
        "dta",
    }
    assert found["algorithm.mine"].remedy == "correct it, or remove it, unless code of your own reads it"
    one = found["algorithm.adv_estimater"]
    assert (one.severity, one.problem) == ("warning", "verl does not have this option")
    assert one.remedy == "did you mean 'algorithm.adv_estimator'?"
    assert not list(misspelt.misspelt(OWN, OWN)) and not list(misspelt.misspelt(config, {}))


def test_a_field_of_the_dataclass_that_a_table_becomes_is_known() -> None:
    config = {"data": {"_target_": "composer_plugins.losses.row.Parameter", "low": 1}}
    own = {"data": {"_target_": "x", "lo": 0}}
    assert not list(misspelt.misspelt(config, own))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("algorithm.adv_estimater=composer", "algorithm.adv_estimator=composer"),
        ("algorithm.composr.hint_weight=0.1", "+algorithm.composer.hint_weight=0.1"),
        ("algorithm.composer.hint_weight=0.1", "+algorithm.composer.hint_weight=0.1"),
        (
            "actor_rollout_ref.actor.policy_loss.compser=${algorithm.composer}",
            "+actor_rollout_ref.actor.policy_loss.composer=${algorithm.composer}",
        ),
        ("algorithm.mine=1", "+algorithm.mine=1"),
    ],
)
def test_the_override_that_was_meant_has_a_plus_only_for_a_key_that_verl_does_not_have(
    given: str, meant: str
) -> None:
    table = given.partition("=")[0]
    message = (
        f"ConfigCompositionException: Could not override '{table}'. To append to your config use +{given}"
    )
    assert misspelt.corrected(message, OWN) == (given, meant)
    assert misspelt.corrected("ScannerError: mapping values are not allowed here", OWN) == ("", "")


def test_a_plus_before_a_key_that_verl_has_is_removed() -> None:
    message = "Could not append to config. An item is already at 'algorithm.gamma'. Either remove + prefix: "
    message += "'algorithm.gamma=0.9' Or add a second + to add or override 'algorithm.gamma': '++algorithm'"
    assert misspelt.corrected(message, OWN) == ("+algorithm.gamma=0.9", "algorithm.gamma=0.9")
