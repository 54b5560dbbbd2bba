"""NeMo-RL's and slime's configs: what is read, what is written, and what is not understood."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins.adapters.slime_loss.migration import OURS
from composer_plugins.cli import given
from composer_plugins.frameworks.nemo_rl import NEMO_RL
from composer_plugins.frameworks.slime import ICEPOP
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.objective import Objective
from composer_plugins.objective.resolve import examine, migrate, resolve


def read(framework: str, **table: Any) -> Objective:
    """What a framework trains with these options; each option of NeMo-RL's is below loss_fn."""
    found = resolve(framework, {"loss_fn": table} if framework == "nemo-rl" else table)
    assert not found.errors, found.errors
    return found.required()


# A framework, options of NeMo-RL below loss_fn or of slime, and what they say; both in YAML.
READ = f"""
nemo-rl | | policy: grpo, policy.clip_high: 0.2, denominator: token-mean, old_logprobs: trainer
nemo-rl | | KL: k3_corrected, KL.weight: 0.01, KL.old_logprobs: policy itself, KL.value_clamp: 10.0
nemo-rl | | rollout correction: null, completions per prompt: 16
nemo-rl | use_cispo: true, ratio_clip_max: 4.0 | policy: cispo, policy.clip_high: 4.0
nemo-rl | sequence_level_importance_ratios: true, token_level_loss: false, ratio_clip_max: 0.0004 | \
policy: gspo, denominator: seq-mean-token-mean, policy.clip_high: 0.0004
nemo-rl | force_on_policy_ratio: true | old_logprobs: policy itself
nemo-rl | kl_input_clamp_value: null | KL.log_ratio_clamp: null, KL.value_clamp: 10.0
nemo-rl | reference_policy_kl_penalty: 0 | KL: null
nemo-rl | use_on_policy_kl_approximation: true | KL.old_logprobs: rollout engine
nemo-rl | use_importance_sampling_correction: true | rollout correction: tis
nemo-rl | use_importance_sampling_correction: true, truncated_importance_sampling_type: icepop, \
truncated_importance_sampling_ratio: 5.0, truncated_importance_sampling_ratio_min: 0.5 | \
rollout correction: mis, rollout correction.low: 0.5, rollout correction.high: 5.0
slime | | policy: grpo, policy.clip_low: 0.2, denominator: seq-mean-token-mean, KL: null
slime | | advantage: grpo, advantage.eps: 0.000001, completions per prompt: 1
slime | eps_clip: 0.1 | policy.clip_low: 0.1, policy.clip_high: 0.1
slime | eps_clip: 0.1, eps_clip_high: 0.3 | policy.clip_low: 0.1, policy.clip_high: 0.3
slime | kl_loss_coef: 0.1 | KL: null
slime | use_kl_loss: true, kl_loss_coef: 0.1 | KL: k1, KL.weight: 0.1
slime | use_kl_loss: true, kl_loss_coef: 0.1, kl_loss_type: low_var_kl, use_unbiased_kl: true | \
KL: k3_corrected, KL.value_clamp: 10.0, KL.old_logprobs: trainer
slime | calculate_per_token_loss: true | denominator: token-mean
slime | use_opsm: true | policy: opsm, policy.threshold: 0.0001, rollout_logprobs: trainer
slime | use_tis: true, custom_tis_function_path: {ICEPOP}, tis_clip: 5.0 | rollout correction: mis, \
rollout correction.high: 5.0
slime | disable_grpo_std_normalization: true | advantage: dr_grpo
slime | use_rollout_logprobs: true | old_logprobs: rollout engine
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("line", READ.strip().splitlines())
def test_a_config_is_what_its_options_say(line: str) -> None:
    framework, *tables = line.split(" |")
    options, facts = (yaml.safe_load(f"{{{table}}}") for table in tables)
    objective = read(framework, **options)
    found = objective.facts()
    assert {name: found.get(name) for name in facts} == facts
    again = migrate(objective, framework)  # what is written reads as the same
    assert [str(one) for one in again.differences if one.what != "not carried over"] == []


def test_a_command_line_of_slime_is_written_for_nemo_rl_without_a_difference() -> None:
    words = "--advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --n-samples-per-prompt 8"
    read_here = given.read([], "slime", [*words.split(), "--moe-layer-freq", "([0]*3+[1]*45)"])
    objective = resolve("slime", read_here.table()).required()
    found = migrate(objective, "nemo-rl")
    assert not found.differences and found.table["loss_fn"]["ratio_clip_max"] == 0.28


def test_defaults_and_interpolations_of_nemo_rl_are_read(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "grpo: {normalize_rewards: false, use_leave_one_out_baseline: true, num_generations_per_prompt: 4,\n"
        "  adv_estimator: {name: grpo, normalize_rewards: '${grpo.normalize_rewards}',\n"
        "    use_leave_one_out_baseline: '${grpo.use_leave_one_out_baseline}'}}\n"
        "loss_fn: {ratio_clip_max: 0.28, ratio_clip_c: 10, reference_policy_kl_penalty: 0.0}\n"
    )
    (tmp_path / "child.yaml").write_text("defaults: base.yaml\nloss_fn: {ratio_clip_max: 0.3}\n")
    (tmp_path / "over.yaml").write_text(
        "defaults: base.yaml\nloss_fn: {_override_: true, ratio_clip_max: 0.3}\n"
    )

    def facts(file: str, *overrides: str) -> dict[str, Any]:
        table = ByTable(NEMO_RL).merged_config([tmp_path / file], [*overrides])
        return resolve("nemo-rl", table).required().facts()

    found = facts("child.yaml", "grpo.num_generations_per_prompt=6")
    assert found["policy.clip_high"] == 0.3 and found["policy.dual_clip"] == 10
    assert found["advantage"] == "rloo" and found["completions per prompt"] == 6 and found["KL"] is None
    found = facts("over.yaml")
    assert found["policy.dual_clip"] is None and found["KL.weight"] == 0.01
    assert facts("child.yaml", "grpo.normalize_rewards=true")["advantage"] == "grpo_leave_one_out"


def test_an_advantage_that_no_row_is_is_named() -> None:
    table = {"loss_fn": {}, "grpo": {"adv_estimator": {"name": "gdpo"}}}
    (remark,) = resolve("nemo-rl", table).required().remarks
    assert "no advantage of the catalogue" in remark and "'gdpo'" in remark


@pytest.mark.parametrize(
    ("table", "key", "words"),
    [
        ({"loss_fn": {"reference_policy_kl_type": "k4"}}, "loss_fn.reference_policy_kl_type", "k4"),
        ({"loss_fn": {"use_cispo": True, "disable_ppo_ratio": True}}, "loss_fn.use_cispo", "no loss of the"),
        ({"loss_fn": {"ratio_clip_c": 0.5}}, "loss_fn.ratio_clip_c", "0.5"),
    ],
)
def test_the_doctor_of_nemo_rl_names_what_is_wrong(table: dict[str, Any], key: str, words: str) -> None:
    found = [one for one in examine("nemo-rl", table).findings if one.key == key]
    assert any(words in str(one) for one in found)


def test_a_correction_of_slimes_user_is_never_reported_as_none() -> None:
    objective = read("slime", use_tis=True, custom_tis_function_path="mine.tis")
    assert objective.correction is None and any("mine.tis" in one for one in objective.remarks)


MINE = {"loss_type": "custom_loss", "custom_loss_function_path": OURS}


def test_the_doctor_of_slime_reads_our_own_options() -> None:
    objective = read("slime", **MINE, composer={"policy": "dppo_tv", "policy_params": {"tv_low": 0.1}})
    assert objective.facts()["policy.tv_low"] == 0.1 and not objective.no_policy
    assert not resolve("slime", {**MINE, "use_opd": True, "composer": {"policy": "opd"}}).errors
    assert "of your own" in read("slime", loss_type="custom_loss", custom_loss_function_path="a.b").no_policy
    assert "sft_loss" in read("slime", loss_type="sft_loss").no_policy


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**MINE, "composer": {"policy": "dppo"}}, "composer.policy: "),
        (
            {**MINE, "composer": {"policy": "opd"}},
            "needs teacher_logprobs, and slime has none without use_opd",
        ),
        ({"composer": {"policy": "dppo_tv"}}, "only our loss reads it"),
    ],
)
def test_the_doctor_of_slime_names_what_is_wrong_in_them(table: dict[str, Any], said: str) -> None:
    (found,) = resolve("slime", table).errors
    assert found.key.startswith("composer") and said in str(found)


@pytest.mark.parametrize("kind", ["distillation", "dpo", "sft", "rm", "ppo"])
def test_another_training_of_nemo_rl_is_not_taken_for_grpo(kind: str) -> None:
    found = resolve("nemo-rl", {kind: {"seed": 1}, "loss_fn": {"kl_type": "mixed"}, "policy": {}})
    assert found.required().no_policy and not found.findings and not found.unread


def test_a_hint_of_slime_is_divided_as_the_policy_loss_and_its_teacher_is_looked_at() -> None:
    teacher = {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.0}
    composer = {"policy": "dapo", "hint_weight": 0.1}
    found = resolve("slime", {**MINE, **teacher, "calculate_per_token_loss": True, "composer": composer})
    assert found.required().denominators["hint_weight"] == "token-mean" and found.unread == ()
