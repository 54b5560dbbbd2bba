"""The words of a framework's own command line, as `doctor` and `migrate` read them after `--`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.objective.words import CommandLine, command_line
from parity_tests.rigs.commands import error, invoke
from parity_tests.rigs.paths import ROOT


def read(framework: str, *words: str) -> CommandLine:
    return command_line(frameworks()[framework], words)


OPTIONS = (
    ("verl", "+reward.a=1 ~critic ++a.b=[1,2] a.c=", "+reward.a=1 ~critic ++a.b=[1,2] a.c="),
    ("verl", "-cn ppo_trainer --config-path=./config a.b=1", "a.b=1"),
    ("nemo-rl", "loss_fn.ratio_clip_max=0.28 +a.b=1", "loss_fn.ratio_clip_max=0.28 +a.b=1"),
    ("trl", "--beta 0.1 --epsilon-high=0.28", "beta=0.1 epsilon_high=0.28"),
    ("trl", "--no_bf16 --use_vllm --loss_type dapo", 'bf16=false use_vllm=true loss_type="dapo"'),
    ("trl", "--scale_rewards False --bf16 False", 'scale_rewards="False" bf16=false'),
    ("trl", "--reward_weights 1 0.5 --learning_rate 1e-6", "reward_weights=[1,0.5] learning_rate=1e-06"),
    ("trl", '--policy_params {"clip_high":0.28}', 'policy_params={"clip_high":0.28}'),
    ("slime", "--seed -1 --no-rope-fusion", "seed=-1 rope_fusion=false"),
    ("slime", "--moe-layer-freq ([0]*3+[1]*45) --stop *", 'moe_layer_freq="([0]*3+[1]*45)" stop="*"'),
    ("prime-rl", "--a.group-size 4 --a.b=c --no-clean", 'a.group_size=4 a.b="c" clean=false'),
    # A file in a table.
    (
        "prime-rl",
        "--clean --trainer @ t.toml --inference @i.toml",
        "clean=true trainer=@t.toml inference=@i.toml",
    ),
)


@pytest.mark.parametrize(("framework", "words", "overrides"), OPTIONS)
def test_options_are_key_and_value(framework: str, words: str, overrides: str) -> None:
    found = read(framework, *words.split())
    assert [one.replace(", ", ",").replace(": ", ":") for one in found.overrides] == overrides.split()
    assert not found.files


@pytest.mark.parametrize(
    ("framework", "words", "files", "config"),
    [
        ("verl", "--config-path=conf --config-name='mine'", "conf/mine.yaml", ""),
        ("verl", "-cd=conf -cn mine.yaml", "conf/mine.yaml", ""),
        ("verl", "--config-path=config --config-dir conf --config-name mine", "conf/mine.yaml", ""),
        ("verl", "--config-path=./config --config-name ppo_megatron_trainer", "", "ppo_megatron_trainer"),
        ("nemo-rl", "--config conf/mine.yaml", "conf/mine.yaml", ""),
        ("trl", "--config conf/mine.yaml --beta 0.1", "conf/mine.yaml", ""),
        ("prime-rl", "@ a.toml @b.toml --x 1 @ c.toml", "a.toml b.toml c.toml", ""),
    ],
)
def test_a_config_file_is_taken_as_the_framework_takes_it(
    framework: str, words: str, files: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    Path("conf/mine.yaml").write_text("{}")
    found = read(framework, *words.replace("'", "").split())
    assert ([*map(str, found.files)], found.config) == (files.split(), config)


def test_the_file_of_slime_replaces_its_arguments(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("eps_clip: 0.3\ncomposer: {policy: cispo}\n")
    words = f"--eps-clip 0.2 --eps-clip-high 0.28 --custom-config-path {file}"
    assert read("slime", *words.split()) == ((file,), ("eps_clip_high=0.28",), "")


@pytest.mark.parametrize(
    ("framework", "words", "named"),
    [
        ("verl", "python3 -m verl.trainer.main_ppo a.b=1", "'python3'|write key=value|in the place of"),
        ("verl", "a.b=1 --cfg job", "'--cfg'|verl's command line"),
        ("verl", "=1", "'=1'"),
        ("verl", "--config-name mine", "mine.yaml is not found;|--config-dir"),
        ("verl", "--config-path=conf --config-name mine", "mine.yaml is not found in conf;"),
        ("slime", "train.py --eps-clip 0.2", "'train.py'|write --option value"),
        ("trl", "--beta=0.1 0.2", "'0.2'|write --option value"),
        ("trl", "--config --beta 0.1", "'--config'|write --config FILE"),
        ("prime-rl", "@ a.toml b.toml", "'b.toml'"),
        ("torchtitan", "--module x", "torchtitan's command line are not read|before it"),
    ],
)
def test_a_word_that_is_not_read_is_named(framework: str, words: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(framework, *words.split())
    assert all(one in str(caught.value) for one in named.split("|")), caught.value


def test_the_framework_is_named_before_its_words() -> None:
    for command in (["doctor"], ["migrate", "--to", "verl"]):
        said = error(*command, "--", "a=1")
        assert "not named; name it before --, with --framework (doctor) or --from" in said


def test_files_and_options_may_stand_on_both_sides(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("algorithm: {adv_estimator: rloo}")
    words = f"{file} custom_reward_function.path=r.py --from verl --to verl -- algorithm.adv_estimator=opo"
    done = invoke("migrate", *words.split())
    assert f"# The loss of {file} + 2 overrides of verl" in done.stdout and "advantage: opo" in done.stdout


SCRIPT = """
set -u
loss_mode=${LOSS_MODE:-gspo}
DATA=(data.train_files="$HOME/train.parquet" data.max_response_length=$((1024 * 8)))
ACTOR=(actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode}
       actor_rollout_ref.actor.clip_ratio_low=0.0003)
ACTOR+=(actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean)
$TRAIN --config-path=./config --config-name='ppo_trainer' \\
    "${DATA[@]}" "${ACTOR[@]}" trainer.logger='["console","wandb"]' "$@" 2>&1 | tee log.txt
"""


def test_the_shell_itself_expands_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    python = Path(sys.executable)  # the script splits $TRAIN at blanks, and a folder's name may have some
    train = f"{python.name} -m composer_plugins migrate --from verl --to prime-rl --"
    path = os.pathsep.join((str(python.parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "TRAIN": train, "PYTHONPATH": str(ROOT)}
    command = ["bash", "run.sh", "actor_rollout_ref.rollout.n=8"]
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "# The loss of ppo_trainer + 7 overrides of verl" in said
    assert 'policy = "gspo' in said and "clip_low = 0.0003" in said and "group_size = 8" in said


def test_json_has_the_files_and_the_options_of_the_words(tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("loss_fn: {ratio_clip_max: 0.28}")
    done = invoke("doctor", "--framework", "nemo-rl", "--json", "--", "--config", str(file), "+a.b=1")
    found = json.loads(done.stdout)
    assert found["files"] == [str(file)] and found["overrides"] == ["+a.b=1"]


@pytest.mark.parametrize("name", ["run.sh", "run.slurm"])
def test_a_script_is_one_error_that_says_what_to_put_into_it(name: str) -> None:
    for command in (["doctor"], ["migrate", "--from", "verl", "--to", "trl"]):
        said = error(*command, name)
        assert said.startswith(
            f"{name}: a script is not read; put `composer-plugins doctor --framework verl --`"
        )


def test_python_code_is_no_config_and_the_error_says_which_command_reads_it() -> None:
    for command in (["doctor"], ["migrate", "--from", "verl", "--to", "trl"]):
        for name in ("losses/mine.py", "losses/mine.py:7"):
            assert error(*command, name) == (
                f"{name}: it is Python code, and not a config; check a loss with `composer-plugins check "
                "losses/mine.py:FUNCTION`, and of torchtitan name the function that makes the config, as "
                "my_package.config_registry:my_config_function"
            )
