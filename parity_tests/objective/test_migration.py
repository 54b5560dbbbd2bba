"""What `composer-plugins migrate` reads and writes between verl and PRIME-RL, without either of them."""

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from composer_plugins.adapters.prime_rl_plugin.options import MODULE, parse
from composer_plugins.cli.recorded import examples
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.prime_rl import LOSSES
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.objective.differences import EFFECTS, NOT_CARRIED_OVER, TO_CORRECT, effect_of
from composer_plugins.objective.differences import differences as differing
from composer_plugins.objective.keys import not_looked_at
from composer_plugins.objective.objective import KL, NORM, Objective, behaviours, of_choice
from composer_plugins.objective.resolve import migrate, resolve
from parity_tests.cases.verl_config import ACTOR, CORRECTION, ESTIMATOR, GROUP_SIZE, LOSS_MODE, NODE, changed

# Options of ComposerConfig that no channel has.
NOT_OF_A_CHANNEL = {
    "health",
    "record_batches",
    "record_every",
    "policy",
    "policy_params",
    "advantage",
    "advantage_params",
    "old_policy",
}
NOT_OF_A_CHANNEL |= {"rollout_correction", "rollout_correction_params"}
GRPO = {ESTIMATOR: "grpo", "algorithm.norm_adv_by_std_in_grpo": False, GROUP_SIZE: 8}
GPG, SAPO, GEO_MEAN = ({LOSS_MODE: name} for name in ("gpg", "sapo", "geo_mean"))
KL_LOSS, KL_REWARD = {f"{ACTOR}.use_kl_loss": True}, {"algorithm.use_kl_in_reward": True}
AGG, LENGTH = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
COMPOSER = {LOSS_MODE: "composer"}
Table = dict[str, Any]


def verl(*changes: Table) -> Table:
    """A config of verl's with these changes; with advantages that PRIME-RL has, unless they say otherwise."""
    made = changed({}, GRPO)
    for one in changes:
        changed(made, one)
    return made


def prime_rl(*changes: Table, **loss: Any) -> Table:
    """A config of PRIME-RL's, with this loss, and changes by dotted keys."""
    made: Table = {"trainer": {"loss": {"type": "default"} | loss}}
    for one in changes:
        changed(made, one)
    return made


def ours(*changes: Table, **kwargs: Any) -> Table:
    """A config of PRIME-RL's with our loss."""
    return prime_rl(*changes, type="custom", import_path=f"{MODULE}.loss_fn", kwargs=kwargs)


def read(framework: str, table: Table, version: str | None = None) -> Objective:
    """The objective in a config."""
    return resolve(framework, table, version).required()


def differences(source: str, table: Table, target: str, version: str | None = None) -> list[str]:
    """What differs after a migration."""
    return [str(one) for one in migrate(read(source, table, version), target, version).differences]


def objectives(*kinds: str) -> Iterator[Objective]:
    """Objectives with every loss of these kinds, and with every option of a channel."""
    vespo = choose("policy", "vespo")
    options = {name: "x" for name in ComposerConfig.model_fields if name not in NOT_OF_A_CHANNEL}
    terms = dict.fromkeys(("KL", "entropy bonus", "policy_weight", "hint_weight", "replay_weight"), "tokens")
    for row in losses():
        if row.kind not in kinds:
            continue
        one = choose(row.kind, row.name, examples(row))
        yield Objective(
            policy=one if row.kind == "policy" else vespo,
            mode=NORM,
            advantage=one if row.kind == "advantage" else None,
            group_size=None if row.kind == "advantage" else 8,
            kl=KL(one if row.kind == "kl" else choose("kl", "k1"), 0.1),
            correction=one if row.kind == "correction" else None,
            entropy=0.1,
            channels=options,
            denominators=terms,
        )


def test_every_property_has_a_sentence_and_every_sentence_a_property() -> None:
    properties = {
        what for one in objectives("policy", "advantage", "kl", "correction") for what in one.facts()
    }
    assert {"KL.denominator", "advantage.ddof", "policy_weight.multiplies", "hint_t_start"} < properties
    properties |= {NOT_CARRIED_OVER, TO_CORRECT}
    assert {effect_of(what) for what in properties} == set(EFFECTS)


OLD = "old_logprobs: trainer -> rollout engine"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [OLD]),
        (GPG | {AGG: "seq-mean-token-mean"}, ["denominator: seq-mean-token-mean -> token-mean"]),
        (GPG | {AGG: NORM, LENGTH: 8}, [f"denominator: {NORM} (max_length 8) -> token-mean"]),
        # sapo's mode is one in verl, whatever is set
        (SAPO, ["denominator: seq-mean-token-mean -> token-mean", OLD]),
        (
            GPG | {"algorithm.norm_adv_by_std_in_grpo": True},
            ["advantage: grpo (scale group, ddof 1, eps 1e-06) -> dr_grpo"],
        ),
        (
            GPG | {ESTIMATOR: "gae"},
            [
                "advantage: not one of the catalogue's -> dr_grpo",
                "not carried over: algorithm.adv_estimator = 'gae', which needs more than a group's rewards",
            ],
        ),
        (
            GPG | KL_LOSS | {f"{ACTOR}.kl_loss_coef": 0.01},
            [
                "KL: k3 (log_ratio_clamp 20, value_clamp 10, weight 0.01, place loss, denominator token-mean)"
                " -> none"
            ],
        ),
        (GPG | KL_REWARD, ["KL: k1 (weight 0.001, place reward) -> none"]),
        (GPG | {f"{ACTOR}.entropy_coeff": 0.1}, ["entropy bonus: 0.1 (denominator token-mean) -> 0"]),
        (GPG | {f"{CORRECTION}.rollout_is": "token"}, []),  # PRIME-RL's weight has no clamp
        (
            GPG | {f"{CORRECTION}.rollout_rs": "token_k1"},
            [f"not carried over: {CORRECTION}.rollout_rs = 'token_k1'"],
        ),
    ],
)
def test_what_prime_rl_cannot_do_is_listed(changes: Table, expected: list[str]) -> None:
    assert differences("verl", verl(changes), "prime-rl") == expected


VERLS = {
    f"{CORRECTION}.rollout_is": "sequence",
    f"{CORRECTION}.rollout_is_threshold": "0.5_3.0",
    f"{CORRECTION}.rollout_is_batch_normalize": True,
    f"{ACTOR}.clip_ratio_high": 0.3,
    f"{ACTOR}.clip_ratio_c": 10.0,
    f"{ACTOR}.entropy_coeff": 0.01,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.02,
    f"{ACTOR}.kl_loss_type": "k3+",
    AGG: NORM,
    LENGTH: 9,
    "actor_rollout_ref.rollout.temperature": 0.7,
}
PRIME_RLS = {
    "orchestrator.algo.type": "max_rl",
    "orchestrator.group_size": 4,
    "orchestrator.train.sampling.temperature": 0.7,
}
TIS = {"policy": "reinforce", "rollout_correction": "tis", "rollout_correction_params": {"cap": 3.0}}
IN_VERL = {"policy.clip_high": 0.3, "policy.dual_clip": 10.0, "entropy bonus": 0.01, "KL": "k3_plus"}
IN_VERL |= {"KL.weight": 0.02, "denominator.max_length": 9, "rollout correction.normalise": True}
IN_PRIME_RL = {"advantage": "maxrl", "completions per prompt": 4, "rollout correction.cap": 3.0}


@pytest.mark.parametrize(
    ("framework", "table", "facts"),
    [("verl", verl(VERLS), IN_VERL), ("prime-rl", ours(PRIME_RLS, **TIS), IN_PRIME_RL)],
)
def test_a_config_with_everything_set_is_written_whole(framework: str, table: Table, facts: Table) -> None:
    objective = read(framework, table)
    assert (facts | {"temperature": 0.7}).items() <= objective.facts().items()
    found = migrate(objective, framework)
    assert found.differences == () and read(framework, found.table).facts() == objective.facts()


def test_a_ratio_to_the_policy_itself_is_one_that_verl_does_not_have() -> None:
    found = differences("prime-rl", ours(policy="grpo", old_policy="current"), "verl")
    assert found == ["old_logprobs: policy itself -> trainer"]


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.bypass_mode": True}, "correction", None),
        ({f"{CORRECTION}.bypass_mode": True}, "old", "rollout engine"),
        (GEO_MEAN, "mode", "seq-mean-token-mean"),
        (COMPOSER | {NODE: {"policy": "gmpo@verl"}}, "mode", "seq-mean-token-mean"),
        (KL_REWARD | {"algorithm.kl_ctrl.kl_coef": 0}, "kl", None),
    ],
)
def test_what_an_option_of_verl_means(changes: Table, name: str, value: object) -> None:
    assert getattr(read("verl", verl(changes)), name) == value


def test_a_mode_that_verl_forces_is_written_and_is_not_that_of_its_kl() -> None:
    written = migrate(read("verl", verl(GEO_MEAN)), "verl").table
    assert written["actor_rollout_ref"]["actor"]["loss_agg_mode"] == "seq-mean-token-mean"
    assert read("verl", verl(SAPO, KL_LOSS)).facts()["KL.denominator"] == "token-mean"


NOTHING_DIFFERS = {
    "a forced mode beside a KL": ("verl", verl(SAPO, KL_LOSS)),
    "a KL in the loss with the weight 0": ("verl", verl(KL_REWARD, KL_LOSS, {f"{ACTOR}.kl_loss_coef": 0.0})),
    "the hint's teacher, which both ask for": ("prime-rl", ours(policy="reinforce", hint_weight=0.1)),
    "a ratio to the policy itself": ("prime-rl", ours(policy="grpo", old_policy="current")),
}


@pytest.mark.parametrize("case", NOTHING_DIFFERS)
def test_what_a_framework_gets_back_does_not_differ(case: str) -> None:
    framework, table = NOTHING_DIFFERS[case]
    assert differences(framework, table, framework) == []


def test_the_policy_of_the_workers_is_the_one_in_their_own_table() -> None:
    table = verl(COMPOSER, {NODE: {"policy": "gspo"}, f"{ACTOR}.policy_loss.composer": {"policy": "cispo"}})
    assert read("verl", table).policy.name == "cispo"


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        (f"{ROLLOUT}.top_p", 1, 0.9),
        (f"{ROLLOUT}.top_k", -1, 20),
        (f"{ROLLOUT}.do_sample", True, False),
        (f"{ACTOR}.router_replay.mode", "disabled", "R3"),
        (f"{ACTOR}.megatron.router_replay.mode", "disabled", "R2"),
        *((ESTIMATOR, "grpo", name) for name in ("gae", "gdpo", "remax", "optimal_token_baseline")),
    ],
)
def test_a_value_that_changes_the_training_is_not_lost(key: str, neutral: object, other: object) -> None:
    assert differences("verl", verl({key: neutral}), "verl") == []
    for target in ("verl", "prime-rl") if key == ESTIMATOR else ("verl",):
        found = differences("verl", verl({key: other}), target)
        assert any(one.startswith(f"not carried over: {key} = {other!r}") for one in found)
    assert resolve("verl", verl({key: other})).unread == ()


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (KL_REWARD | {"algorithm.kl_ctrl.type": "adaptive"}, "algorithm.kl_ctrl.type"),
        ({"defaults": ["my_base", "_self_"]}, "defaults: 'my_base'"),
        (GEO_MEAN | {f"{CORRECTION}.rollout_is": "token"}, "geo_mean takes the geometric mean"),
    ],
)
def test_what_verl_reads_beside_the_loss_is_not_lost(changes: Table, key: str) -> None:
    assert any(
        one.startswith(f"not carried over: {key}") for one in differences("verl", verl(changes), "verl")
    )


@pytest.mark.parametrize(
    ("framework", "table", "message"),
    [
        ("verl", verl({f"{ACTOR}.use_kl_loss": "${x}"}), "actor.use_kl_loss: .*interpolation"),
        ("verl", verl({f"{ACTOR}.use_kl_loss": "False"}), "actor.use_kl_loss: it is 'False'; set true or"),
        ("verl", verl({AGG: "foo"}), "actor.loss_agg_mode: unknown mode 'foo'"),
        ("verl", verl({AGG: NORM, LENGTH: float("inf")}), "loss_scale_factor: it is inf; set a"),
        ("verl", verl({f"{ACTOR}.policy_loss": "gspo"}), "actor.policy_loss: it is 'gspo'; write a table"),
        ("verl", verl({f"{ACTOR}.clip_ratio_high": [1]}), "clip_ratio_high"),
        ("verl", verl(KL_LOSS, {f"{ACTOR}.kl_loss_type": ["k3"]}), "kl_loss_type"),
        ("verl", {"algorithm": {"composer": [1]}}, "algorithm.composer: it is .*; write a table"),
        (
            "verl",
            verl({f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": "abc"}),
            "algorithm.rollout_correction.rollout_is_threshold: it is 'abc'; set a number, or a band",
        ),
        ("prime-rl", prime_rl(dppo_mask_high=10**400), "dppo_mask_high: .*(set a|correct the value)"),
        ("prime-rl", prime_rl({"orchestrator.algo": "grpo"}), "orchestrator.algo: .*write a table"),
        ("prime-rl", prime_rl(type="custom", import_path="my.loss"), "import_path: 'my.loss' is not our f"),
    ],
)
def test_a_value_that_the_framework_would_not_take_is_one_error(
    framework: str, table: Table, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        migrate(read(framework, table), framework)


@pytest.mark.parametrize("value", [True, "8", 0, 2.5, float("nan")])
def test_a_number_is_checked_in_the_same_words_for_every_framework(value: object) -> None:
    for framework, table in (
        ("verl", verl({GROUP_SIZE: value})),
        ("prime-rl", prime_rl({"orchestrator.group_size": value})),
    ):
        with pytest.raises(ConfigError) as caught:
            read(framework, table)
        assert (caught.value.problem, caught.value.remedy) == (
            f"it is {value!r}",
            "set an integer in [1, inf)",
        )


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "dapo@verl"),
        ({"loss_agg_mode": NORM}, "dr_grpo@verl"),
        ({}, "grpo@verl"),
        ({"clip_ratio_high": 0.28}, "dapo@verl"),  # with dual_clip 3
        ({"clip_ratio_high": 0.3}, "grpo@verl"),
        ({"clip_ratio_c": 10.0}, "grpo@verl"),
        ({"clip_ratio_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"}, "grpo@verl"),
    ],
)
def test_verls_vanilla_is_named_as_the_loss_whose_options_it_has(options: Table, policy: str) -> None:
    table = verl({f"{ACTOR}.{name}": value for name, value in options.items()})
    assert read("verl", table).policy.name == policy
    assert differences("verl", table, "verl") == []


@pytest.mark.parametrize(
    ("loss", "policy", "params"),
    [
        ({}, "dppo_tv@prime-rl", {}),
        ({"dppo_mask_high": 0.3, "kl_tau": 0.0}, "dppo_tv@prime-rl", {"tv_high": 0.3, "kl_tau": 0.0}),
        ({"type": "ipo", "ipo_threshold": 0.2}, "ipo@prime-rl", {"tv_low": 0.2, "tv_high": 0.2}),
    ],
)
def test_the_deleted_default_of_prime_rl_runs_here(
    loss: Table, policy: str, params: dict[str, float]
) -> None:
    found = migrate(read("prime-rl", prime_rl(**loss)), "prime-rl")
    written = tomllib.loads(found.text)["trainer"]["loss"]
    assert found.differences == ()
    assert written["type"] == "custom" and written["import_path"].endswith("prime_rl_plugin.loss_fn")
    assert written["kwargs"].get("policy_params", {}) == params
    asked, _ = parse(written["kwargs"])
    assert asked is not None and asked.choice.name == policy


@pytest.mark.parametrize("kind", ["default", "ipo"])
def test_every_option_of_prime_rls_losses_changes_the_objective(kind: str) -> None:
    own = next(one for one in LOSSES if one.options["type"] == kind)
    before = read("prime-rl", prime_rl(type=kind)).facts()
    for option in own.own:
        value = 0.05 if option.default != 0.05 else 0.1
        assert read("prime-rl", prime_rl(type=kind, **{option.key: value})).facts() != before, option.key


def test_the_hint_and_the_replay_are_carried_as_far_as_the_target_has_them() -> None:
    node = {"policy": "grpo@verl", "hint_weight": 0.5, "hint_divergence": "jsd", "hint_top_k": 16}
    node |= {"replay_weight": 0.1, "replay_loss": "simpo"}
    table = {"algorithm": {"adv_estimator": "composer", "composer": node}}
    changed(table, COMPOSER | {GROUP_SIZE: 8})
    assert differences("verl", table, "verl") == []
    with pytest.raises(ConfigError, match=r"'jsd' needs student_logits.* which prime-rl does not provide"):
        migrate(read("verl", table), "prime-rl")
    node |= {"hint_divergence": "sampled_token"}
    del node["hint_top_k"]
    found = differences("verl", table, "prime-rl")
    assert "replay_loss: simpo -> dpo" in found
    assert any(one.startswith("not carried over: the hint's teacher") for one in found)


def test_a_channel_with_a_reference_gets_one_in_verl() -> None:
    found = migrate(read("prime-rl", ours(policy="reinforce", hint_weight=0.1)), "verl")
    actor = found.table["actor_rollout_ref"]["actor"]
    assert actor["use_kl_loss"] is True and actor["kl_loss_coef"] == 0.0
    assert found.table["trainer"] == {"v1": {"trainer_mode": "composer_sync"}}
    assert not any("KL" in one.what for one in found.differences)


def test_a_bare_loss_is_compared_only_in_what_it_says() -> None:
    assert migrate(of_choice(choose("policy", "gpg@verl")), "prime-rl").differences == ()


@pytest.mark.parametrize(("clamp", "is_small"), [(20.0, True), (0.5, False)])
def test_a_bound_is_small_only_if_usual_numbers_do_not_reach_it(clamp: float, is_small: bool) -> None:
    source, target = (
        read("prime-rl", ours(**TIS | {"rollout_correction_params": {"cap": 2.0} | more}))
        for more in ({"log_ratio_clamp": clamp}, {})
    )
    (found,) = differing(source, target)
    assert found.what == "rollout correction.log_ratio_clamp" and found.is_small is is_small


def test_what_the_doctor_calls_an_error_in_the_written_config_is_listed() -> None:
    node = {"policy": "grpo@verl", "hint_weight": 1.0, "hint_divergence": "jsd"}
    (found,) = differences("verl", verl(COMPOSER, {NODE: node}), "verl")
    assert found.startswith(f"to correct in this config: {NODE}.hint_top_k")


def test_a_parameter_that_is_none_is_in_the_toml_too() -> None:
    table = verl(COMPOSER, {NODE: {"policy": "grpo@verl", "policy_params": {"dual_clip": None}}})
    found = migrate(read("verl", table), "prime-rl")
    written = read("prime-rl", tomllib.loads(found.text)).policy
    assert written.value("dual_clip") is None and written.value("log_ratio_clamp") == 20.0


def test_bounds_keep_all_their_digits() -> None:
    params = {"low": 0.123456789, "high": 2.000000001}
    table = ours(policy="reinforce", rollout_correction="icepop", rollout_correction_params=params)
    correction = read("verl", migrate(read("prime-rl", table), "verl").table).correction
    assert correction is not None and {name: correction.value(name) for name in params} == params


@pytest.mark.parametrize(("target", "parse"), [("verl", yaml.safe_load), ("prime-rl", tomllib.loads)])
def test_the_text_holds_all_that_was_written_and_nothing_differs(target: str, parse: Any) -> None:
    """test_migration_pairs.py has the losses that all frameworks run, between any two of them."""
    written = 0
    for one in objectives("policy"):
        old, rollout = behaviours(one.policy, "rollout engine", "rollout engine")
        plain = replace(one, mode="token-mean", old=old, rollout=rollout, kl=None, entropy=0.0)
        plain = replace(plain, advantage=choose("advantage", "dr_grpo"), channels={}, denominators={})
        try:
            found = migrate(plain, target)
        except ConfigError:  # it does not have the loss
            continue
        again = read(target, parse(found.text))
        assert found.differences == () and again.facts() == read(target, found.table).facts()
        written += 1
    assert written > 20


def test_which_keys_are_not_looked_at() -> None:
    known = {"a.x", "b", "c.d.e"}
    table = {
        "a": [{"x": 1, "y": 2}, {"z": {"u": 1}}],
        "b": {"anything": 1},
        "c": {"d": 3, "f": {}},
        "e": {},
        "g": None,
    }
    assert list(not_looked_at(table, known)) == ["a.y", "a.z.u", "c.d", "g"]
    assert list(not_looked_at({"a": {}, "c": {"d": {}}}, known)) == []
    assert "my_fork.alpha" in resolve("verl", verl({"my_fork.alpha": 1})).unread
