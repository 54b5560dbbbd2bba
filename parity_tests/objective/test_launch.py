"""What a launch script gives a framework, as `doctor` and `migrate` read it."""

import json
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import OURS
from composer_plugins.objective.launch import Launch, launch
from parity_tests.rigs.commands import invoke

NEWEST = """#!/bin/bash
set -x
loss_mode=${LOSS_MODE:-gspo}
max_response_length=$((1024 * 8))
DATA=(data.train_files="$HOME/train.parquet" data.max_response_length=${max_response_length})
ACTOR=(
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
    actor_rollout_ref.actor.clip_ratio_low=0.0003
)
ACTOR+=(actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean)
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_trainer' \\
    "${DATA[@]}" "${ACTOR[@]}" trainer.logger='["console","wandb"]' $@ 2>&1 | tee log.txt
"""
RAY = """
export VERL_USE_EXTERNAL_MODULES=my_losses
ray job submit --runtime-env=$RUNTIME -- python3 -m recipe.dapo.main_dapo \\
    algorithm.adv_estimator=grpo actor_rollout_ref.actor.entropy_coeff=$ENTROPY "$MORE" +reward.a=1 ~critic
"""
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
N = 8
beta = 0.1
def main(args):
    more = {"loss_type": "dapo", "epsilon": 0.2}
    config = GRPOConfig(output_dir=args.out, num_generations=N, max_completion_length=2 * 1024,
                        beta=beta, temperature=args.temperature, use_vllm=True, **more)
"""
VERL = "actor_rollout_ref.actor."
# The name of the file, its text, the framework, the options, and the keys of what is not known of it.
SCRIPTS: list[tuple[str, str, str, list[str], list[str]]] = [
    (
        *("a.sh", NEWEST, "verl"),
        [
            *("data.max_response_length=8192", f"{VERL}policy_loss.loss_mode=gspo"),
            *(f"{VERL}clip_ratio_low=0.0003", f"{VERL}loss_agg_mode=seq-mean-token-mean"),
            'trainer.logger=["console","wandb"]',
        ],
        ["data.train_files"],  # verl's own ppo_trainer, by a path from its main_ppo
    ),
    (
        *("a.slurm", RAY, "verl", ["algorithm.adv_estimator=grpo", "+reward.a=1", "~critic"]),
        [f"{VERL}entropy_coeff", "$MORE"],
    ),
    (
        "a.sh",
        "torchrun -m verl.trainer.main_ppo --config-path=conf -cn mine a.b=1 stray",
        "verl",
        ["a.b=1"],
        ["stray", "--config-name"],
    ),
    (
        "a.sh",
        "python verl/trainer/main_ppo.py \\\na.b=1\nactor.x=2 \\\n c=3\n",
        "verl",
        ["a.b=1"],
        ["a.sh:3"],
    ),
    (
        *(
            "a.sh",
            "trl grpo --config c.yaml --loss_type dapo --epsilon-high=0.28 --no_bf16 --use_vllm --beta $B",
            "trl",
        ),
        ["loss_type=dapo", "epsilon_high=0.28", "bf16=false", "use_vllm=true"],
        ["--config", "beta"],
    ),
    ("a.sh", "C=$1\ntrl grpo --config $C --beta 1", "trl", ["beta=1"], ["--config"]),
    (
        "a.sh",
        'M=(); if [ -n "$D" ]; then M=(--beta 1); fi\ntrl grpo --bf16 "${M[@]}" --epsilon 0.1',
        "trl",
        ["bf16=true", "epsilon=0.1"],
        ["$M"],
    ),
    (
        "a.sh",
        "case $X in a) L='--beta 1';; esac\ntrl grpo --output_dir out $L",
        "trl",
        ["output_dir=out"],
        ["$L"],
    ),
    ("a.sh", "cat a.txt | xargs python -m verl.trainer.main_ppo a.b=1", "verl", ["a.b=1"], ["xargs"]),
    (
        "a.sh",
        "E=''; [ -z \"$D\" ] || E='--b 1'\nrl --output-dir out $E --output-dir $O",
        "prime-rl",
        ["output_dir=out"],
        ["$E", "output_dir"],
    ),
    (
        "a.sh",
        "trl grpo --scale_rewards False --no_scale_rewards --bf16 False",
        "trl",
        ['scale_rewards="False"', "no_scale_rewards=true", "bf16=False"],
        [],
    ),
    ("a.sh", "trl grpo --reward_funcs a b --beta 0.1", "trl", ['reward_funcs=["a", "b"]', "beta=0.1"], []),
    (
        *("a.py", SCRIPT, "trl"),
        [
            *("num_generations=8", "max_completion_length=2048", "beta=0.1", "use_vllm=true"),
            *('loss_type="dapo"', "epsilon=0.2"),
        ],
        ["output_dir", "temperature"],
    ),
    ("a.py", "GRPOConfig(**made())", "trl", [], ["**made()"]),
    (
        "a.py",
        "a = GRPOConfig(beta=0.1)\na.epsilon, model.temperature = 0.3, 1\nsetattr(a, 'loss_type', 'grpo')\n"
        "b = dataclasses.replace(a, delta=2.0)",
        "trl",
        ["beta=0.1"],
        ["epsilon", "loss_type", "delta"],
    ),
    (
        "a.py",
        "base = dict(beta=0.1)\nGRPOConfig(**dict(**base, epsilon=0.3), **{**base, 'delta': 2.0})",
        "trl",
        ["beta=0.1", "epsilon=0.3", "beta=0.1", "delta=2.0"],
        [],
    ),
    (
        "a.py",
        "more, other = {}, 1\nc = {'beta': 0.1}\nif X: c['epsilon'] = 0.3\nd = {}\nd.update(delta=2.0)\n"
        "GRPOConfig(**c, **d)",
        "trl",
        [],
        ["**c", "**d"],
    ),
    (
        "a.py",
        "class Mine(GRPOTrainer):\n    def _compute_loss(self): ...\n    def log(self): ...\n"
        "class Named(GRPOTrainer):\n    def log(self): ...\n"
        "Mine(args=GRPOConfig())\nGMPOTrainer(args=GRPOConfig())\nNamed()",
        "trl",
        [],
        ["class Mine", "GMPOTrainer"],
    ),
    (
        "a.sh",
        "uv run rl @ a.toml --trainer.loss.type ipo --max-steps 5",
        "prime-rl",
        ["trainer.loss.type=ipo", "max_steps=5"],
        ["@"],
    ),
    (
        "a.sh",
        "uv run rl --trainer.loss.type ipo &\nuv run trainer --a.b=1",
        "prime-rl",
        ["trainer.loss.type=ipo", "a.b=1"],
        [],
    ),
]


def read(folder: Path, name: str, text: str) -> Launch:
    (folder / name).write_text(text)
    return launch(str(folder / name), OURS)


@pytest.mark.parametrize(("name", "text", "framework", "options", "unknown"), SCRIPTS)
def test_what_a_script_gives(
    tmp_path: Path, name: str, text: str, framework: str, options: list[str], unknown: list[str]
) -> None:
    found = read(tmp_path, name, text)
    assert (found.framework.name, list(found.overrides)) == (framework, options)
    assert {one.key.removeprefix(f"{tmp_path}/") for one in found.findings} == set(unknown)


def test_a_file_that_a_script_names_is_found_from_its_folder_or_above(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("{}")
    found = read(tmp_path / "examples", "a.sh", "python -m verl.trainer.main_ppo -cp conf -cn mine a.b=1")
    assert found.files == (tmp_path / "conf" / "mine.yaml",) and not found.findings
    (tmp_path / "examples" / "train.py").write_text("import trl\nc = trl.GRPOConfig(beta=0.5)\n")
    found = read(tmp_path, "b.sh", "accelerate launch --num_processes 2 examples/train.py --x 1")
    assert found.overrides == ("beta=0.5",)
    (tmp_path / "examples" / "train.py").write_text("TrlParser((GRPOConfig, X))\nargs.epsilon_high = 0.3")
    found = read(tmp_path, "b.sh", "accelerate launch examples/train.py --beta 1")
    assert found.overrides == ("beta=1",) and [one.key for one in found.findings] == ["epsilon_high"]


def test_a_file_that_the_script_writes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("algorithm: {adv_estimator: rloo}")
    text = "cat > mine.yaml <<EOF\na: 1\nEOF\npython -m verl.trainer.main_ppo -cp . -cn mine"
    found = read(tmp_path, "a.sh", text)
    assert not found.files and "writes it itself" in found.findings[0].problem


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.sh", "python train.py a=1", "no training that is known|main_ppo"),
        ("a.sh", "echo rl", "no training that is known"),
        ("a.py", "DPOConfig(beta=1)", "no training that is known"),
        ("a.py", "GRPOConfig(", "is not Python"),
        ("a.sh", "x() { python -m verl.trainer.main_ppo a.b=$1; }\nx 1\nx 2\n", ""),
        ("a.sh", "trl grpo --beta 1\ntrl grpo --beta 2", "the lines 1, 2|a.sh:1"),
    ],
)
def test_a_script_without_one_training_is_one_error(tmp_path: Path, name: str, text: str, words: str) -> None:
    if not words:  # the same line of a function, called twice: the last call is read
        assert read(tmp_path, name, text).overrides == ("a.b=2",)
        return
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, text)
    assert all(word in str(caught.value) for word in words.split("|"))
    if "a.sh:1" in words:
        assert launch(f"{tmp_path}/a.sh:2", OURS).overrides == ("beta=2",)


def test_migrate_and_doctor_read_a_script(tmp_path: Path) -> None:
    (file := tmp_path / "run.sh").write_text(RAY)
    done = invoke("migrate", str(file), "--to", "verl")
    out = done.stdout
    assert done.exit_code == 1 and out.startswith("# Read as a config of verl 0.9.1.")
    named = (
        f"# Not known, and it may bear on the loss: {VERL}entropy_coeff: its value is not known: ENTROPY is"
    )
    assert named in out and "Of what was understood" in out
    more = (f"{VERL}entropy_coeff=0.1", "--to", "verl")
    assert "ENTROPY" not in invoke("migrate", str(file), *more).stdout
    (file := tmp_path / "run").write_text(
        "python -m verl.trainer.main_ppo data.train_files=$X algorithm.adv_estimator=grpo"
    )
    done = invoke("migrate", "--script", str(file), "--to", "verl")
    assert done.exit_code == 0 and "# Nothing differs.\n" in done.stdout  # the paths of data have no bearing
    done = invoke("doctor", "--verl", "--script", str(file), "--json")
    assert json.loads(done.stdout)["overrides"] == ["algorithm.adv_estimator=grpo"]


def test_a_script_whose_calls_and_loops_double_without_end_is_one_error(tmp_path: Path) -> None:
    functions = [f"f{i}() {{ for x in a b; do n=$x; f{i + 1}; f{i + 1}; done; }}" for i in range(15)]
    text = "\n".join([*functions, "f15() { python3 -m verl.trainer.main_ppo a.b=$n; }", "f0"])
    with pytest.raises(ConfigError, match=r"stages\.sh: more than \d+ commands would have to be followed"):
        read(tmp_path, "stages.sh", text)
