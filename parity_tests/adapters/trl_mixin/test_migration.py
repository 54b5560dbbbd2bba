"""`composer-plugins migrate` from TRL and to it. The gradients: adapters/verl_plugin/test_migration.py."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.migration import BATCH
from composer_plugins.cli.migrate import comments
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.trl import LOSS_OPTIONS, LOSS_TYPES
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.objective import MISSING, of_choice
from composer_plugins.objective.resolve import migrate, resolve
from parity_tests.rigs import tiny
from parity_tests.rigs.commands import invoke, output
from parity_tests.rigs.paths import ROOT


def differences(source: str, table: dict[str, Any], target: str) -> list[str]:
    return [str(one) for one in migrate(resolve(source, table).required(), target).differences]


SAMPLED = {"hint_weight": 1.0, "hint_divergence": "sampled_token"}
VESPO = {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
K3 = {"use_bias_correction_kl": False}
CLAMPS = ["KL.log_ratio_clamp", "KL.value_clamp"]
HINT, REPLAY, CUT = (
    "hint_weight.denominator",
    "replay_weight.denominator",
    "rollout correction.log_ratio_clamp",
)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, []),
        ({"scale_rewards": "group"}, []),  # TRL's epsilon is one that our estimator in verl takes too
        ({"beta": 0.04, **K3}, CLAMPS),
        ({"beta": 0.04, "use_bias_correction_kl": True}, ["KL"]),
        ({"use_vllm": True}, [CUT]),
        ({"top_entropy_quantile": 0.8}, ["not carried over"]),
        ({"mask_truncated_completions": True}, ["not carried over"]),
        ({"loss_type": "bnpo"}, ["denominator"]),
        ({"temperature": 0.7, "entropy_coef": 0.01}, ["entropy bonus.denominator"]),
        (SAMPLED, [HINT]),
        ({"hint_weight": 1.0, "hint_teacher": "ema"}, [HINT, "to correct in this config"]),
        ({"replay_weight": 1.0}, [REPLAY]),
        ({"replay_weight": 1.0, "temperature": 0.7}, ["replay_temperature", REPLAY]),
        (
            {"policy_weight": 0.5, "entropy_coef": 0.1, **SAMPLED},
            ["entropy bonus.denominator", HINT, "policy_weight.multiplies"],
        ),
        (VESPO, [CUT, "rollout correction.enters"]),
        ({"beta": 0.1, **K3, "sync_ref_model": True}, [*CLAMPS, "not carried over"]),
        ({"reward_weights": [1.0, 2.0]}, ["not carried over"]),
        ({**SAMPLED, "hint_source": "successful_rollout"}, [HINT, "not carried over"]),
    ],
)
def test_what_verl_does_otherwise_is_listed(table: dict[str, Any], expected: list[str]) -> None:
    found = differences("trl", {"scale_rewards": "none", **table}, "verl")
    assert [one.partition(":")[0] for one in found] == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"beta": "abc"}, "beta: it is 'abc'; set a finite number"),
        ({"temperature": [1]}, r"temperature: it is \[1\]; set a finite number"),
        ({"loss_type": ["grpo"]}, "loss_type: with .*, \\['grpo'\\] is not a loss of the catalogue"),
        ({"loss_type": "gspo"}, "loss_type: .*'gspo' is not a loss"),
        ({"importance_sampling_level": "sequence_token"}, "importance_sampling_level: unknown level"),
        ({"scale_rewards": "False"}, "scale_rewards: unknown scale_rewards 'False'"),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence"},
            "loss_type: .*sequence.*'cispo' is not a loss of the catalogue",
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_mas"},
            "vllm_importance_sampling_mode: unknown mode .*did you mean 'token_mask'",
        ),
        (
            {"policy": "grpo", "polcy_params": {}},
            "polcy_params: unknown option .*did you mean 'policy_params'",
        ),
        (
            {"beta": 0, "on_bad_rewards": "zero"},
            "on_bad_rewards: unknown option .*did you mean 'on_bad_reward'",
        ),
        ({"use_vllm": "False"}, "use_vllm: it is 'False'; set true or false"),
        ({"vllm_importance_sampling_clip_max": "x"}, "vllm_importance_sampling_clip_max: it is 'x'; set a"),
    ],
)
def test_a_config_that_trl_would_not_take_is_one_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("trl", table).required()


# What a training script of TRL reads beside GRPOConfig, in this release and in earlier ones, and the loss.
USUAL = """
model_name_or_path: Qwen/Qwen3-4B
dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
lora_r: 16
dataset_name: trl-lib/DeepMath-103K
dataset_train_split: train
report_to: [wandb]
warmup_steps: 10
gradient_checkpointing_kwargs: {use_reentrant: false}
num_generations: 8
loss_type: dapo
epsilon: 0.2
epsilon_high: 0.2
scale_rewards: none
beta: 0.0
temperature: 1.0
top_p: 1.0
top_k: 0
repetition_penalty: 1.0
use_vllm: true
vllm_importance_sampling_correction: false
reward_weights: [1.0, 1, 1.0]
"""


def test_a_usual_config_of_trl_is_understood(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text(USUAL)
    said = output("migrate", str(file), "--from", "trl", "--to", "trl")
    versions = f"TRL {upstream.VERSION}'s GRPOConfig, which is installed here"
    assert said.splitlines()[0] == f"# Read as a config of {versions}. Written for {versions}."
    assert "# Nothing that is known here differs.\n" in said


def test_a_key_that_no_table_names_is_not_looked_at() -> None:
    assert {"my_fork", "lora_r"} <= {*resolve("trl", yaml.safe_load(USUAL) | {"my_fork": 3}).unread}


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("reward_weights", [1.0, 1], [1.0, 0.5]),
        ("top_p", 1.0, 0.9),
        ("top_k", 0, 20),
        ("min_p", 0.0, 0.1),
        ("repetition_penalty", 1.0, 1.1),
        ("generation_kwargs", {}, {"top_p": 0.9}),
    ],
)
def test_a_value_that_changes_nothing_is_no_difference(key: str, neutral: object, other: object) -> None:
    assert differences("trl", {key: neutral}, "trl") == []
    assert differences("trl", {key: other}, "trl") == [f"not carried over: {key} = {other!r}"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: x/y\nrl: gdpo\ntrl: {beta: 0.04}", "Axolotl: base_model, rl, trl stand"),
        ("stage: ppo\nfinetuning_type: lora", "LLaMA-Factory: finetuning_type, stage stand"),
        ("rlhf_type: grpo\nbeta: 0.04\nnum_generations: 8", "ms-swift: rlhf_type stands"),
        ("actor_rollout_ref: {}\nbeta: 0.04", "verl: actor_rollout_ref stands"),
    ],
)
def test_a_config_of_another_schema_is_refused_by_its_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^--from: the config is one of {words}"):
        resolve("trl", yaml.safe_load(text))


def test_a_policy_loss_that_is_not_there_is_left_to_the_user() -> None:
    table = {"algo": {"type": "opd"}, "group_size": 8, "train": {"sampling": {"temperature": 0.7}}}
    found = migrate(resolve("prime-rl", {"orchestrator": table}).required(), "trl")
    assert found.table["policy"] == MISSING and "loss_type" not in found.table
    assert found.table["num_generations"] == 8 and found.table["temperature"] == 0.7
    with pytest.raises(ConfigError, match="policy"):
        tiny.config(**yaml.safe_load(found.text))


def verl(correction: dict[str, Any] | None = None, **actor: Any) -> dict[str, Any]:
    """A config of verl whose advantages TRL has too."""
    grpo = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}
    algorithm = grpo | ({} if correction is None else {"rollout_correction": correction})
    rollout = {"n": 4, "temperature": 0.9}
    return {"algorithm": algorithm, "actor_rollout_ref": {"actor": actor, "rollout": rollout}}


def test_vllm_gets_no_correction_that_the_source_did_not_have() -> None:
    written = migrate(resolve("verl", verl()).required(), "trl").table
    assert resolve("trl", written | {"use_vllm": True}).required().correction is None


def test_trl_has_no_groups_of_one() -> None:
    table = verl()
    table["actor_rollout_ref"]["rollout"]["n"] = 1
    assert "completions per prompt: 1 -> 8" in differences("verl", table, "trl")


# A value other than TRL's default, where the default and 0.25 do not do.
VALUES: dict[str, Any] = {
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 0.5,
    "max_completion_length": 100,
    "num_generations": 4,
    "loss_type": "dr_grpo",
    "importance_sampling_level": "sequence",
    "delta": 1.21,
    "off_policy_mask_threshold": 0.001,
    "top_entropy_quantile": 0.5,
}


def test_every_option_of_the_loss_is_a_fact_or_a_remark() -> None:
    """A value other than TRL's default changes what is compared, for each option in LOSS_OPTIONS."""
    entropy = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
    for name in LOSS_OPTIONS.keys() - BATCH:
        default, value = upstream.DEFAULTS[name], VALUES.get(name)
        if value is None:
            value = not default if isinstance(default, bool) else (default or 0.0) + 0.25
        kind = name.partition("_")[0]
        table: dict[str, Any] = {"loss_type": kind} if kind in ("sapo", "vespo") else {}
        table |= {"loss_type": "dr_grpo"} if name == "max_completion_length" else {}
        table |= {"beta": 0.1} if name == "use_bias_correction_kl" else {}
        table |= {"use_vllm": True} if name.startswith("vllm_") else {}
        table |= {"use_adaptive_entropy": True} if name in entropy else {}
        before = resolve("trl", table).required()
        after = resolve("trl", table | {name: value}).required()
        changed = before.facts() != after.facts() or before.remarks != after.remarks
        assert changed or before.group_size != after.group_size, name


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_a_loss_of_trls_own_becomes_ours_with_nothing_different(kind: str) -> None:
    bound = 5.0 if kind == "cispo" else 0.3
    found = migrate(resolve("trl", {"loss_type": kind, "epsilon_high": bound}).required(), "trl")
    assert found.differences == ()
    tiny.config(**yaml.safe_load(found.text))


def test_verls_loss_with_its_dual_clip_and_its_clamps_runs_in_trl() -> None:
    found = migrate(resolve("verl", verl(clip_ratio_c=5.0)).required(), "trl")
    assert found.differences == ()
    assert found.table["policy_params"] == {"dual_clip": 5.0}
    assert found.table["loss_type"] == "dapo" and found.table["temperature"] == 0.9


@pytest.mark.parametrize(("kind", "mode"), [("sequence", "sequence_mask"), ("token", "token_mask")])
def test_a_correction_of_verls_becomes_the_one_of_trl(kind: str, mode: str) -> None:
    """IcePop is TRL's mask per token."""
    table = verl({"rollout_is": kind, "rollout_is_threshold": "0.5_3.0"})
    found = migrate(resolve("verl", table).required(), "trl")
    assert [str(one) for one in found.differences] == ["rollout correction.log_ratio_clamp: 20 -> none"]
    assert found.table["vllm_importance_sampling_mode"] == mode
    assert found.table["vllm_importance_sampling_clip_min"] == 0.5


@pytest.mark.parametrize(("policy", "kind"), [("dppo_tv", "token"), ("vespo", "sequence")])
def test_a_correction_that_trl_refuses_beside_a_policy_is_a_difference(policy: str, kind: str) -> None:
    table = verl({"rollout_is": kind}, policy_loss={"loss_mode": "composer"})
    table["algorithm"]["composer"] = {"policy": policy}
    assert [one for one in differences("verl", table, "trl") if one.startswith("rollout correction: tis")]


def test_the_example_of_the_page_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "migrate.md").read_text()
    source, shown = re.findall(r"```(?:yaml)?\n(.*?)```", page[page.index("```yaml") :], re.DOTALL)[:2]
    read = resolve("verl", yaml.safe_load(source))
    found = migrate(read.required(), "trl")
    lines = comments("grpo.yaml of verl", "trl", found, read)
    assert shown == "".join(f"# {line}".rstrip() + "\n" for line in lines)


def test_a_bare_loss_has_no_constant_length() -> None:
    found = migrate(of_choice(choose("policy", "dr_grpo")), "trl")
    assert found.differences == ()


def test_a_hint_and_trls_own_kl_are_named_for_skyrl() -> None:
    hint = migrate(resolve("trl", {"policy": "grpo", "hint_weight": 0.5}).required(), "skyrl")
    assert [one.what for one in hint.differences] == ["hint_weight", "hint_divergence"]
    (kl,) = migrate(resolve("trl", {"beta": 0.04}).required(), "skyrl").differences
    assert str(kl).startswith("KL: k3_corrected ") and "denominator seq-mean-token-mean" in str(kl)


def test_the_doctor_examines_a_config_of_trl(tmp_path: Path) -> None:
    """Without a doctor of its own: what `resolve` finds is what a trainer would raise or warn of."""
    doctor = ("doctor", "--framework", "trl", str(file := tmp_path / "grpo.yaml"))
    file.write_text("policy: cispo\npolicy_params: {clip_high: 28}\nepsilon_hgih: 0.3\n")
    said = output(*doctor)
    assert "1 warning, against the options of TRL" in said and "not looked at: epsilon_hgih" in said
    assert "policy_params.clip_high\n  clip_high=28" in said
    found = json.loads(output(*doctor, "--json"))["findings"]
    assert [one["severity"] for one in found] == ["warning"]
    file.write_text("policy: cispoo\n")
    done = invoke(*doctor)
    assert done.exit_code == 1 and "error: policy\n  unknown policy loss 'cispoo'" in done.output
