"""`composer-plugins migrate` as its user sees it. What is read and written: objective/test_migration.py."""

import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins import cli
from composer_plugins.objective.differences import EFFECTS


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: its status, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["composer-plugins", "migrate", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return command


@pytest.fixture
def run_on(run: Any, tmp_path: Path) -> Any:
    """The command on a file with this text."""

    def command(text: str, source: str, target: str, *more: str) -> tuple[int, str, str]:
        file = tmp_path / ("a.toml" if source == "prime-rl" else "a.yaml")
        file.write_text(text)
        return run(str(file), *more, "--from", source, "--to", target)

    return command


def test_the_command_prints_a_config_that_its_reader_reads(run_on: Any, tmp_path: Path) -> None:
    text = '[trainer.loss]\ntype = "ipo"\n[orchestrator]\ngroup_size = 4\n'
    status, out, err = run_on(text, "prime-rl", "verl")
    assert (status, err) == (0, "")
    assert out.splitlines()[1].startswith(f"# The loss of {tmp_path}/a.toml of prime-rl, for verl.")
    assert "# Nothing differs." in out
    assert yaml.safe_load(out)["actor_rollout_ref"]["rollout"]["n"] == 4
    status, out, _ = run_on(out, "verl", "prime-rl")
    assert status == 0 and tomllib.loads(out)["trainer"]["loss"]["kwargs"] == {"policy": "ipo@prime-rl"}


def test_the_status_says_whether_something_differs(run_on: Any) -> None:
    # YAML 1.1 reads 1e-3 as a string, and verl's own parser as a number.
    actor = "{use_kl_loss: true, kl_loss_coef: 1e-3}"
    text = f"algorithm: {{adv_estimator: grpo}}\nactor_rollout_ref: {{actor: {actor}}}\n"
    status, out, _ = run_on(text, "verl", "prime-rl")
    assert status == 1
    assert "#   KL: k3 (log_ratio_clamp 20, value_clamp 10, weight 0.001, place loss, denominator " in out


def test_a_bare_loss_by_the_command(run: Any) -> None:
    status, out, _ = run("--loss", "grpo@verl", "--to", "prime-rl")
    assert status == 1 and "# 1 of its properties differs:" in out
    assert 'policy = "grpo@verl"' in out and 'old_policy = "rollout"' in out


def test_what_changes_the_training_stands_first_and_each_line_is_explained(run_on: Any) -> None:
    text = """
algorithm: {adv_estimator: composer, composer: {advantage: grpo@verl, advantage_params: {eps: 1e-4}}}
actor_rollout_ref:
  actor: {policy_loss: {loss_mode: gspo}, use_kl_loss: true, loss_agg_mode: seq-mean-token-mean}
  rollout: {n: 8}
"""
    status, out, _ = run_on(text, "verl", "prime-rl")
    head = out.partition("\n[")[0].splitlines()
    differing = [(line[4:].partition(":")[0], after) for line, after in pairwise(head) if " -> " in line]
    order = ["advantage", "KL", "denominator", "old_logprobs"]
    assert status == 1 and [what.partition(" ")[0] for what, _ in differing] == order
    assert all(after.removeprefix("#     ").startswith(EFFECTS[what].meaning) for what, after in differing)
    assert "# 4 of its properties differ:" in out and "Only extreme values" not in out
    assert "What is trained changes" in out


def test_options_of_a_command_line_replace_those_of_the_file(run: Any, run_on: Any, tmp_path: Path) -> None:
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {actor: {clip_ratio_high: 0.3}}\n"
    given = ("actor_rollout_ref.actor.clip_ratio_high=2.5e-1", "+actor_rollout_ref.rollout.n=4")
    _, out, _ = run_on(text, "verl", "verl", *given)
    written = yaml.safe_load(out)
    assert out.splitlines()[1].startswith(f"# The loss of {tmp_path}/a.yaml + 2 overrides of verl")
    assert written["algorithm"]["composer"]["policy_params"] == {"clip_high": 0.25}
    assert written["actor_rollout_ref"]["rollout"]["n"] == 4
    _, out, _ = run_on(text, "verl", "verl", "~actor_rollout_ref.actor.clip_ratio_high")
    assert "clip_high" not in out
    status, alone, _ = run("algorithm.adv_estimator=grpo", "--from", "verl", "--to", "verl")
    assert status == 0 and alone.splitlines()[1].startswith("# The loss of 1 override of verl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "FILE, --loss|neither is given"),
        ("--loss grpo x.yaml --to verl", "both are given"),
        ("--loss grpoo --to verl", "--loss|did you mean 'grpo'"),
        ("--loss grpo --to verll", "--to|did you mean 'verl'"),
        ("--loss kimi --to verl", "--loss|no default|give a config file"),
        ("--loss clip_cov --to verl", "clip_cov|micro-batches"),
        ("no.yaml --from verl --to trl", "no.yaml|No such file"),
        ("no.yaml --from trl --to tinker", "--to|tinker has no config file"),  # whatever is installed
        ("no.yaml --to trl", "--from|no framework is given"),
        ("algorithm=3 algorithm.adv_estimator=grpo --from verl --to verl", "algorithm.adv_estimator|3"),
        ("algorithm.adv_estimator=[ --from verl --to verl", "algorithm.adv_estimator|cannot be parsed"),
        ("a.yaml b.yaml --from verl --to verl", "FILE|2 are given"),
        ("algorithm.adv_estimator=grpo --from verl --version 9 --to verl", "--version|PRIME-RL"),
        ("--loss grpo --from verl --to verl", "--from|--loss"),
        ("beta=0.1 --from verl --to verl", "--from|beta"),
        ("beta=0.1 --from prime-rl --to verl", "--from|beta"),
    ],
)
def test_a_wrong_command_line_is_one_error(run: Any, arguments: str, words: str) -> None:
    status, out, err = run(*arguments.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and all(word in err for word in words.split("|"))


def test_what_a_default_or_a_second_table_would_hide_is_said(run_on: Any) -> None:
    status, _, err = run_on("algorithm: {adv_estimator: grpo}\nalgorithm: {gamma: 1.0}", "verl", "verl")
    assert status == 2 and "algorithm stands twice in a table" in err
    text = "[trainer.loss]\ntype = 'default'\n[orchestrator]\nbatch_size = 128"
    status, out, _ = run_on(text, "prime-rl", "verl")  # PRIME-RL samples one completion of each prompt
    assert yaml.safe_load(out)["actor_rollout_ref"]["rollout"]["n"] == 1
    status, out, _ = run_on(text.replace("batch_size = 128", "algo.type = 'gropo'"), "prime-rl", "verl")
    assert status == 1 and "not carried over: algo.type = 'gropo'" in out
    sampled = "{algorithm: {adv_estimator: grpo}, trainer: {v1: {sampler: {custom_sampler: {path: a.py}}}}}"
    status, out, _ = run_on(sampled, "verl", "verl")
    assert status == 1 and "custom_sampler.path" in out


# What a launch script of verl sets beside the loss.
USUAL = """
data: {train_files: a.parquet, max_response_length: 1024, my_own_dataset: {x: 1}}
algorithm: {adv_estimator: grpo, filter_groups: {enable: false, metric: acc}, kl_ctrl: {kl_coef: 0.001}}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, lora_rank: 32}
  actor: {optim: {lr: 1e-6}, megatron: {tensor_model_parallel_size: 2}, ppo_mini_batch_size: 256}
  rollout: {name: vllm, n: 8, top_p: 1.0, top_k: -1, val_kwargs: {temperature: 0.6, top_p: 0.7}}
  ref: {log_prob_micro_batch_size_per_gpu: 8}
critic: {optim: {lr: 1e-5}}
reward_model: {reward_manager: dapo, overlong_buffer: {enable: false}}
trainer: {logger: [console, wandb], total_epochs: 15}
ray_kwargs: {ray_init: {num_cpus: 8}}
"""


def test_nothing_is_claimed_of_what_stands_beside_the_loss_in_a_config_of_verl(run_on: Any) -> None:
    status, out, _ = run_on(USUAL, "verl", "verl")
    assert status == 0 and "# Nothing that is known here differs.\n" in out
    first, second, *_ = out.splitlines()
    assert first == "# Read as a config of verl 0.9.1. Written for verl 0.9.1."
    assert "data.* (" in second and "actor_rollout_ref.* (" in second


def test_a_key_that_no_table_names_stands_before_the_loss(run: Any) -> None:
    options = ("algorithm.adv_estimator=grpo", "my_fork.alpha=1", "my_fork.beta=1", "seed=3")
    status, out, _ = run(*options, "--from", "verl", "--to", "verl")
    _, first, second, *_ = out.splitlines()
    assert first == "# Not looked at: my_fork.* (2), seed"
    assert second.startswith("# The loss of 4 overrides of verl, for verl.")
    assert status == 0 and "# Nothing that is known here differs.\n" in out


def test_a_key_cannot_break_out_of_the_comment(run_on: Any) -> None:
    _, out, _ = run_on('algorithm: {adv_estimator: grpo}\n"a\\nb: 1": 2\n', "verl", "verl")
    assert "\n# Not looked at: a b: 1\n# " in out
    assert "a" not in yaml.safe_load(out)


EASYR1 = "algorithm: {}\nworker: {actor: {clip_ratio_high: 0.3}, rollout: {n: 5, temperature: 0.6}}"
OTHER = "--from: the config is one of "


@pytest.mark.parametrize(
    ("source", "text", "words"),
    [
        ("verl", "a: [1", "a.yaml: cannot be parsed: ParserError"),
        ("prime-rl", "a = ", "a.toml: cannot be parsed: TOMLDecodeError"),
        ("verl", "just words", "it holds 'just words'; give a file with a table of options"),
        ("verl", "algorithm: {composer: 3}", "error: algorithm.composer: it is 3"),
        ("verl", EASYR1, f"{OTHER}EasyR1: worker stands|write the loss with verl's options"),
        ("verl", "trainer: {algorithm: {}}\ngenerator: {}\nalgorithm: {}", f"{OTHER}SkyRL: generator"),
        ("verl", "algorithm: {}\nexplorer: {}\nsynchronizer: {}", f"{OTHER}Trinity-RFT: explorer, synch"),
        ("verl", "loss_fn: {ratio_clip_min: 0.2}\npolicy: {}", f"{OTHER}NeMo-RL: loss_fn"),
        ("verl", "gconfig: {n_samples: 4}\nactor: {}", f"{OTHER}AReaL: gconfig"),
        ("verl", "orchestrator: {group_size: 8}\ntrainer: {}", f"{OTHER}PRIME-RL: orch|set --from prime-rl"),
        ("prime-rl", "[actor_rollout_ref]\n[trainer]", f"{OTHER}verl: actor_rollout_ref|set --from verl"),
        ("prime-rl", "[worker]\n[trainer]", f"{OTHER}EasyR1: worker|prime-rl's options"),
    ],
)
def test_a_file_that_is_no_config_of_the_framework_is_one_error(
    run_on: Any, source: str, text: str, words: str
) -> None:
    status, out, err = run_on(text, source, "verl")
    assert (status, out) == (2, "") and err.startswith("error: ")
    assert all(word in err for word in words.split("|")), err
