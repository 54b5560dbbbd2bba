"""`composer-plugins migrate` as its user sees it: the meaning of each difference, overrides, wrong input.

Between verl and PRIME-RL, which need neither framework. What is read and written: test_migration.py.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins import cli
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED
from composer_plugins.objective.differences import EFFECTS, NOT_CARRIED_OVER, TO_CORRECT, effect_of
from composer_plugins.objective.differences import differences as differing
from composer_plugins.objective.keys import not_understood
from composer_plugins.objective.objective import KL, NORM, Objective, behaviours
from composer_plugins.objective.resolve import migrate, resolve, surface

# Options of ComposerConfig that no channel has.
NOT_OF_A_CHANNEL = {"policy", "policy_params", "advantage", "advantage_params", "old_policy"}
NOT_OF_A_CHANNEL |= {"rollout_correction", "rollout_correction_params"}
LOSS_FN = "composer_plugins.adapters.prime_rl_plugin.loss_fn"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: its status, stdout and stderr."""

    def command(*arguments: str, name: str = "migrate") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["composer-plugins", name, *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return command


def objectives(*kinds: str) -> Iterator[Objective]:
    """Objectives with every loss of these kinds, and with every option of a channel."""
    vespo = choose("policy", "vespo")
    options = {name: "x" for name in ComposerConfig.model_fields if name not in NOT_OF_A_CHANNEL}
    terms = dict.fromkeys(("KL", "entropy bonus", "policy_weight", "hint_weight", "replay_weight"), "tokens")
    for row in losses():
        required = {n: row.parameters[n].example for n, d in row.defaults.items() if d is REQUIRED}
        if row.kind not in kinds:
            continue
        one = choose(row.kind, row.name, required)
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


def test_what_changes_the_training_stands_first_and_each_line_is_explained(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        """
algorithm: {adv_estimator: composer, composer: {advantage: grpo@verl, advantage_params: {eps: 1e-4}}}
actor_rollout_ref:
  actor: {policy_loss: {loss_mode: gspo}, use_kl_loss: true, loss_agg_mode: seq-mean-token-mean}
  rollout: {n: 8}
"""
    )
    status, out, _ = run(str(file), "--from", "verl", "--to", "prime-rl")
    head = out.partition("\n[")[0].splitlines()
    order = ["advantage: ", "KL: ", "denominator: ", "old_logprobs: "]
    assert status == 1 and [line[4:].partition(" ")[0] + " " for line in head if " -> " in line] == order
    for number, line in enumerate(head):
        if " -> " in line:
            assert (
                head[number + 1]
                .removeprefix("#     ")
                .startswith(EFFECTS[line[4:].partition(":")[0]].meaning)
            )
    assert "What is trained changes" in out and "Only extreme values" not in out


@pytest.mark.parametrize(("what", "value", "is_small"), [("clamp", 20.0, True), ("clamp", 0.5, False)])
def test_a_bound_is_small_only_if_usual_numbers_do_not_reach_it(
    what: str, value: float, is_small: bool
) -> None:
    params = {"cap": 2.0, "log_ratio_clamp": value}
    kwargs = {"policy": "reinforce", "rollout_correction": "tis", "rollout_correction_params": params}
    source = resolve(
        "prime-rl", {"loss": {"type": "custom", "import_path": LOSS_FN, "kwargs": kwargs}}
    ).required()
    target = resolve(
        "prime-rl",
        {
            "loss": {
                "type": "custom",
                "import_path": LOSS_FN,
                "kwargs": kwargs | {"rollout_correction_params": {"cap": 2.0}},
            }
        },
    ).required()
    (found,) = differing(source, target)
    assert found.what == "rollout correction.log_ratio_clamp" and found.is_small is is_small


def test_options_of_a_command_line_replace_those_of_the_file(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {clip_ratio_high: 0.3}}\n")
    given = ("actor_rollout_ref.actor.clip_ratio_high=2.5e-1", "+actor_rollout_ref.rollout.n=4")
    _, out, _ = run(str(file), *given, "--from", "verl", "--to", "verl")
    written = yaml.safe_load(out)
    assert out.startswith(f"# The loss of {file} + 2 overrides of verl")
    assert written["algorithm"]["composer"]["policy_params"] == {"clip_high": 0.25}
    assert written["actor_rollout_ref"]["rollout"]["n"] == 4
    _, out, _ = run(str(file), "~actor_rollout_ref.actor.clip_ratio_high", "--from", "verl", "--to", "verl")
    assert "clip_high" not in out
    status, alone, _ = run("algorithm.adv_estimator=grpo", "--from", "verl", "--to", "verl")
    assert status == 0 and alone.startswith("# The loss of 1 override of verl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("algorithm=3", "algorithm.adv_estimator=grpo", "--from", "verl"), ["algorithm.adv_estimator", "3"]),
        (("algorithm.adv_estimator=[", "--from", "verl"), ["algorithm.adv_estimator", "cannot be parsed"]),
        (("a.yaml", "b.yaml", "--from", "verl"), ["FILE", "2 are given"]),
        (("algorithm.adv_estimator=grpo", "--from", "verl", "--version", "9"), ["--version", "PRIME-RL"]),
        (("--loss", "grpo", "--from", "verl"), ["--from", "--loss"]),
        (("beta=0.1", "--from", "verl"), ["--from", "beta"]),
        (("beta=0.1", "--from", "prime-rl"), ["--from", "beta"]),
    ],
)
def test_a_wrong_command_line_is_one_error(run: Any, arguments: tuple[str, ...], words: list[str]) -> None:
    status, out, err = run(*arguments, "--to", "verl")
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and all(word in err for word in words)


@pytest.mark.parametrize("name", ["migrate", "list", "explain", "doctor", "demo"])
def test_every_command_takes_the_short_option_for_its_help(run: Any, name: str) -> None:
    status, out, _ = run("-h", name=name)
    assert status == 0 and f"composer-plugins {name}" in out


@pytest.mark.parametrize("value", [True, "8", 0, 2.5, float("nan")])
def test_a_number_is_checked_in_the_same_words_for_every_framework(value: object) -> None:
    problems = set()
    for framework, table in (
        ("verl", {"actor_rollout_ref": {"rollout": {"n": value}}}),
        ("prime-rl", {"orchestrator": {"group_size": value}}),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(framework, table).required()
        problems.add((caught.value.problem, caught.value.remedy))
    assert problems == {(f"it is {value!r}", "set an integer in [1, inf)")}


@pytest.mark.parametrize(
    ("actor", "policy"),
    [
        ({"clip_ratio_high": 0.28, "clip_ratio_c": 10.0}, "dapo@verl"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "dr_grpo@verl"),
        ({}, "grpo@verl"),
        ({"clip_ratio_high": 0.28}, "dapo@verl"),  # with dual_clip 3
        ({"clip_ratio_high": 0.3}, "grpo@verl"),
        ({"clip_ratio_c": 10.0}, "grpo@verl"),
        (
            {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "loss_agg_mode": "seq-mean-token-mean"},
            "grpo@verl",
        ),
    ],
)
def test_verls_vanilla_is_named_as_the_loss_whose_options_it_has(actor: dict[str, Any], policy: str) -> None:
    table = {"algorithm": {"adv_estimator": "grpo"}, "actor_rollout_ref": {"actor": actor}}
    assert resolve("verl", table).required().policy.name == policy
    assert not migrate(resolve("verl", table).required(), "verl").differences


def prime_rl(orchestrator: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
    """A config of PRIME-RL with our loss."""
    loss = {"type": "custom", "import_path": LOSS_FN, "kwargs": kwargs}
    return {"trainer": {"loss": loss}, "orchestrator": orchestrator or {}}


def differences(source: str, table: dict[str, Any], target: str, version: str | None = None) -> list[str]:
    objective = resolve(source, table, version).required()
    return [str(one) for one in migrate(objective, target, version).differences]


def test_what_the_doctor_calls_an_error_in_the_written_config_is_listed() -> None:
    alone = differences("prime-rl", prime_rl(policy="reinforce", policy_weight=0.5), "verl")
    assert [
        one for one in alone if one.startswith("to correct in this config: algorithm.composer.policy_weight")
    ]
    hint = {
        "algorithm": {"composer": {"hint_weight": 1.0, "hint_divergence": "sampled_token"}},
        "actor_rollout_ref": {},
    }
    old = differences("verl", hint, "prime-rl", "0.6.0")
    assert [
        one for one in old if one.startswith("to correct in this config: trainer.loss.kwargs.hint_weight")
    ]
    assert not [one for one in differences("verl", hint, "prime-rl") if one.startswith("to correct")]


def test_what_both_configs_ask_for_is_no_difference() -> None:
    hint = prime_rl(policy="reinforce", hint_weight=0.1)
    assert resolve("prime-rl", hint, "0.5.0").required().remarks  # the hint's teacher, the divisor
    assert differences("prime-rl", hint, "prime-rl", "0.5.0") == []


def test_an_algorithm_of_one_source_is_not_lost() -> None:
    train = {"source": [{"algo": {"type": "max_rl"}}, {"env": {"id": "a"}}]}
    table = prime_rl({"train": train}, policy="reinforce")
    assert resolve("prime-rl", table).required().remarks == (
        "orchestrator.train.source.algo.type = 'max_rl'",
    )


def test_a_parameter_that_is_none_is_in_the_toml_too() -> None:
    node = {"policy": "grpo@verl", "policy_params": {"dual_clip": None}}
    table = {
        "algorithm": {"composer": node},
        "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "composer"}}},
    }
    found = migrate(resolve("verl", table).required(), "prime-rl")
    written = resolve("prime-rl", tomllib.loads(found.text)).required().policy
    assert written.value("dual_clip") is None and written.value("log_ratio_clamp") == 20.0


def test_bounds_keep_all_their_digits() -> None:
    params = {"low": 0.123456789, "high": 2.000000001}
    table = prime_rl(policy="reinforce", rollout_correction="icepop", rollout_correction_params=params)
    found = migrate(resolve("prime-rl", table).required(), "verl")
    correction = resolve("verl", found.table).required().correction
    assert correction is not None and {name: correction.value(name) for name in params} == params
    shown = differing(resolve("verl", found.table).required(), resolve("prime-rl", table).required())
    assert [str(one) for one in shown if "high" in one.what or "low" in one.what] == []


def test_a_kl_in_the_reward_with_weight_0_is_none() -> None:
    algorithm = {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0}}
    assert resolve("verl", {"algorithm": algorithm}).required().kl is None


def test_the_policy_of_the_workers_is_the_one_in_their_own_table() -> None:
    policy_loss = {"loss_mode": "composer", "composer": {"policy": "cispo"}}
    table = {
        "algorithm": {"composer": {"policy": "gspo"}},
        "actor_rollout_ref": {"actor": {"policy_loss": policy_loss}},
    }
    assert resolve("verl", table).required().policy.name == "cispo"


@pytest.mark.parametrize("pair", [("verl", "prime-rl"), ("prime-rl", "verl")])
def test_there_and_back_again_nothing_differs(pair: tuple[str, str]) -> None:
    """Every loss that both run: the two are the same, and the text holds all that was written."""
    parse = {"verl": yaml.safe_load, "prime-rl": tomllib.loads}
    source, target = pair
    correction = choose("correction", "icepop", {"log_ratio_clamp": 20.0})
    exact = 0
    for one in objectives("policy"):
        old, rollout = behaviours(one.policy, "rollout engine", "rollout engine")
        plain = Objective(
            policy=one.policy,
            mode="token-mean",
            old=old,
            rollout=rollout,
            advantage=choose("advantage", "dr_grpo"),
            group_size=8,
            correction=None if old or rollout else correction,
        )
        try:
            first = resolve(source, surface(source).write(plain)).required()
            there = migrate(first, target)
        except ConfigError:  # one of them does not have the loss
            continue
        second = resolve(target, parse[target](there.text)).required()
        assert second.facts() == resolve(target, there.table).required().facts()
        assert there.differences == (), one.policy.name
        back = migrate(second, source)
        assert back.differences == ()
        assert resolve(source, parse[source](back.text)).required().facts() == first.facts()
        exact += 1
    assert exact > 20


@pytest.mark.parametrize(
    ("framework", "table"),
    [
        (
            "verl",
            {"actor_rollout_ref": {"actor": {"loss_agg_mode": NORM, "loss_scale_factor": float("inf")}}},
        ),
        ("verl", {"algorithm": {"composer": [1]}}),
        ("prime-rl", {"orchestrator": {"algo": "grpo"}}),
        ("prime-rl", {"orchestrator": {"sampling": {"temperature": 0}}}),
        ("prime-rl", {"trainer": {"loss": {"type": "default", "dppo_mask_high": 10**400}}}),
    ],
)
def test_another_type_of_value_is_one_error(framework: str, table: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set a|write a table|correct the value"):
        migrate(resolve(framework, table).required(), framework)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.5.0", {"rollouts_per_example": 8, "sampling": {"temperature": 0.7}}),
        ("0.6.0", {"group_size": 8, "train": {"sampling": {"temperature": 0.7}}}),
        (None, {"algo": {"type": "max_rl"}, "group_size": 8, "train": {"sampling": {"temperature": 0.7}}}),
    ],
)
def test_an_older_prime_rl_gets_the_options_that_it_has(
    version: str | None, expected: dict[str, Any]
) -> None:
    algorithm = {"adv_estimator": "composer", "composer": {"advantage": "maxrl"}}
    table = {"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 8, "temperature": 0.7}}}
    found = migrate(resolve("verl", table).required(), "prime-rl", version)
    assert found.table["orchestrator"] == expected
    read = resolve("prime-rl", tomllib.loads(found.text), version).required()
    assert (read.group_size, read.temperature) == (8, 0.7)
    different = [one.what for one in found.differences]
    assert ("advantage" in different) is (version is not None)


@pytest.mark.parametrize("name", ["gae", "gdpo", "remax", "optimal_token_baseline"])
def test_an_estimator_that_only_verl_runs_is_a_difference(name: str) -> None:
    table = {"algorithm": {"adv_estimator": name}, "actor_rollout_ref": {"rollout": {"n": 8}}}
    for target in ("verl", "prime-rl"):
        assert [one for one in differences("verl", table, target) if f"adv_estimator = '{name}'" in one]


def test_a_value_of_another_type_is_named_by_its_key() -> None:
    for key, value in (("clip_ratio_high", [1]), ("kl_loss_type", ["k3"])):
        table = {"actor_rollout_ref": {"actor": {"use_kl_loss": True, key: value}}}
        with pytest.raises(ConfigError, match=key):
            resolve("verl", table).required()


# What a launch script of verl sets beside the loss.
USUAL = """
data: {train_files: a.parquet, train_batch_size: 1024, max_response_length: 1024, my_own_dataset: {x: 1}}
algorithm: {adv_estimator: grpo, filter_groups: {enable: false, metric: acc}, kl_ctrl: {kl_coef: 0.001}}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 32, use_remove_padding: true}
  actor:
    optim: {lr: 1e-6, lr_warmup_steps: 10}
    fsdp_config: {param_offload: true}
    megatron: {tensor_model_parallel_size: 2}
    checkpoint: {save_contents: [model]}
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 4
    grad_clip: 1.0
    use_dynamic_bsz: true
  rollout:
    {name: vllm, n: 8, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.6, top_p: 1.0, top_k: -1,
     val_kwargs: {temperature: 0.6, top_p: 0.7}, engine_kwargs: {vllm: {disable_mm: true}}}
  ref: {log_prob_micro_batch_size_per_gpu: 8}
critic: {optim: {lr: 1e-5}}
reward_model: {reward_manager: dapo, overlong_buffer: {enable: true}}
custom_reward_function: {path: r.py}
trainer: {logger: [console, wandb], project_name: p, n_gpus_per_node: 8, total_epochs: 15, save_freq: 20}
ray_kwargs: {ray_init: {num_cpus: 8}}
"""


def test_a_usual_config_of_verl_is_understood(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(USUAL)
    status, out, _ = run(str(file), "--from", "verl", "--to", "verl")
    assert status == 0 and "# Nothing differs.\n" in out and "Not understood" not in out
    assert out.splitlines()[1] == "# Read as a config of verl 0.9.1. Written for verl 0.9.1."


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("my_fork.alpha", "my_fork"),
        ("trainer.spo.enable", "trainer.spo"),
        ("algorithm.norm_adv_by_sdt", "algorithm.norm_adv_by_sdt"),
        ("algorithm.rollout_correction.rollout_iss", "algorithm.rollout_correction.rollout_iss"),
        ("actor_rollout_ref.hint", "actor_rollout_ref.hint"),
        ("actor_rollout_ref.actor.use_off_policy_loss", "actor_rollout_ref.actor.use_off_policy_loss"),
        ("actor_rollout_ref.actor.policy_loss.ratio", "actor_rollout_ref.actor.policy_loss.ratio"),
        ("actor_rollout_ref.rollout.n_prefix", "actor_rollout_ref.rollout.n_prefix"),
    ],
)
def test_a_key_that_is_not_understood_stands_in_the_first_line(run: Any, key: str, named: str) -> None:
    status, out, _ = run("algorithm.adv_estimator=grpo", f"{key}=1", "--from", "verl", "--to", "verl")
    first, second, third, *_ = out.splitlines()
    assert first == f"# Not understood, and it may bear on the loss: {named}"
    assert second == "# Correct or remove each of these keys, or find out what it does and set that by hand."
    assert third.startswith("# The loss of 2 overrides of verl, for verl.")
    assert status == 1 and "# Of what was understood, nothing differs.\n" in out
    assert "Nothing differs" not in out


def test_what_is_not_understood_stands_before_what_differs(run: Any) -> None:
    given = ("algorithm.adv_estimator=grpo", "algorithm.fo=1", "actor_rollout_ref.actor.use_kl_loss=true")
    status, out, _ = run(*given, "--from", "verl", "--to", "prime-rl")
    assert status == 1 and out.startswith("# Not understood, and it may bear on the loss: algorithm.fo\n")
    assert "of its properties differ" in out and "nothing differs" not in out


def test_a_key_cannot_break_out_of_the_comment(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text('algorithm: {adv_estimator: grpo}\n"a\\nb: 1": 2\n')
    _, out, _ = run(str(file), "--from", "verl", "--to", "verl")
    assert out.startswith("# Not understood, and it may bear on the loss: a b: 1\n# ")
    assert "a" not in yaml.safe_load(out)


def test_which_keys_are_not_understood() -> None:
    known = {"a.x", "b", "c.d.e"}
    table = {
        "a": [{"x": 1, "y": 2}, {"z": {"u": 1}}],
        "b": {"anything": 1},
        "c": {"d": 3, "f": {}},
        "e": {},
        "g": None,
    }
    assert list(not_understood(table, known)) == ["a.y", "a.z", "c.d", "g"]
    assert list(not_understood({"a": None, "c": {"d": None}}, known)) == []


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("actor_rollout_ref.rollout.top_p", 1, 0.9),
        ("actor_rollout_ref.rollout.top_k", -1, 20),
        ("actor_rollout_ref.rollout.do_sample", True, False),
        ("actor_rollout_ref.actor.router_replay.mode", "disabled", "R3"),
        ("actor_rollout_ref.actor.megatron.router_replay.mode", "disabled", "R2"),
        ("algorithm.rollout_correction.loss_type", "ppo_clip", "reinforce"),
        ("algorithm.filter_groups.enable", False, True),
        ("distillation.enabled", False, True),
    ],
)
def test_a_value_that_changes_nothing_is_no_difference(
    run: Any, key: str, neutral: object, other: object
) -> None:
    common = ("algorithm.adv_estimator=grpo", "--from", "verl", "--to", "verl")
    status, out, _ = run(f"{key}={neutral}", *common)
    assert status == 0 and "# Nothing differs.\n" in out
    status, out, _ = run(f"{key}={other}", *common)
    assert status == 1 and f"#   not carried over: {key} = {other!r}\n" in out
    assert "Not understood" not in out


EASYR1 = """
algorithm: {adv_estimator: grpo}
worker:
  actor: {clip_ratio_high: 0.3, clip_ratio_low: 0.1}
  rollout: {n: 5, temperature: 0.6}
"""


@pytest.mark.parametrize(
    ("source", "text", "words"),
    [
        ("verl", EASYR1, "EasyR1: worker stands|write the loss with verl's options"),
        ("verl", "trainer: {algorithm: {}}\ngenerator: {}\nalgorithm: {}", "SkyRL: generator"),
        ("verl", "algorithm: {}\nexplorer: {}\nsynchronizer: {}", "Trinity-RFT: explorer, synchronizer"),
        ("verl", "loss_fn: {ratio_clip_min: 0.2}\npolicy: {}", "NeMo-RL: loss_fn"),
        ("verl", "gconfig: {n_samples: 4}\nactor: {}", "AReaL: gconfig"),
        ("verl", "orchestrator: {group_size: 8}\ntrainer: {}", "PRIME-RL: orchestrator|set --from prime-rl"),
        ("prime-rl", "actor_rollout_ref: {}\ntrainer: {}", "verl: actor_rollout_ref|set --from verl"),
        ("prime-rl", "worker: {}\ntrainer: {}", "EasyR1: worker|prime-rl's options"),
    ],
)
def test_a_config_of_another_schema_is_refused_by_its_name(
    run: Any, tmp_path: Path, source: str, text: str, words: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    status, out, err = run(str(file), "--from", source, "--to", "verl")
    assert (status, out) == (2, "") and err.startswith("error: --from: the config is one of ")
    assert all(word in err for word in words.split("|")), err


def test_a_config_with_the_tables_of_its_framework_is_one_of_it() -> None:
    table = {"actor_rollout_ref": {"rollout": {"n": 2}}, "worker": {"x": 1}}
    assert resolve("verl", table).unread == ("worker",)
