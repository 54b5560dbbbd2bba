"""What PRIME-RL trains beside and instead of [trainer.loss]: `migrate` and the doctor name it.

Gradients, and the migration to the other frameworks: adapters/verl_plugin/without_verl, adapters/verl.
"""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from composer_plugins import cli
from composer_plugins.adapters.prime_rl_plugin import keys
from composer_plugins.adapters.prime_rl_plugin.doctor.file import kind_of
from composer_plugins.config import at
from composer_plugins.errors import ConfigError
from composer_plugins.objective.objective import MISSING
from composer_plugins.objective.resolve import migrate, resolve

MODULE = "composer_plugins.adapters.prime_rl_plugin"
Run = Callable[..., tuple[int, str, str]]

CUSTOM = f'{{ type = "custom", import_path = "{MODULE}.cispo" }}'
OPD = 'orchestrator = { algo.type = "opd", group_size = 8 }'
ORCHESTRATOR = """
batch_size = 128
group_size = 8
model.name = "x/y"
train.sampling.temperature = 0.8
[[train.source]]
id = "e"
"""
TRAINERS = f'max_steps = 100\nmodel.name = "x/y"\nloss = {CUSTOM}'
PER_SOURCE = f"""
trainer.loss = {CUSTOM}
[orchestrator]
group_size = 8
[orchestrator.train.sampling]
temperature = 0.7
[[orchestrator.train.source]]
name = "a"
group_size = 16
env.taskset.id = "reverse-text"
sampling.temperature = 1.3
"""
SAME_TWICE = """
[orchestrator]
group_size = 4
algo.type = "grpo"
[[orchestrator.train.source]]
id = "e"
algo.type = "grpo"
"""
SOURCE = "[[orchestrator.train.source]]\n"
FILTER = '[[orchestrator.post_batch_filters]]\ntype = "gibberish"\nenforce = false'
OUR_ECHO = f"""
[orchestrator.algo]
type = "echo"
filter = {{ import_path = "{MODULE}.stored_stamps.echo_filter", kwargs.store = "s" }}
"""
# Tables of a run that have no bearing on its loss, as PRIME-RL's own examples have them.
USUAL = """
max_steps = 500
seq_len = 4096
output_dir = "outputs"
model.name = "Qwen/Qwen3-4B"
wandb.project = "p"
ckpt.interval = 50
deployment.num_train_gpus = 4
inference = { gpu_memory_utilization = 0.9, model.max_model_len = 8192 }
[trainer]
matmul_precision = "high"
model = { attn = "flash_attention_3", lora.rank = 16 }
optim = { lr = 3e-6, weight_decay = 0.0 }
scheduler.type = "linear"
[orchestrator]
batch_size = 512
group_size = 16
max_off_policy_steps = 4
renderer.name = "auto"
eval.interval = 50
post_batch_filters = [{ type = "zero_advantage", enforce = true }]
train.filter_zero_advantages = true
train.sampling.max_completion_tokens = 2048
train.sampling.extra_body = { top_k = -1, min_p = 0.0, chat_template_kwargs.enable_thinking = false }
train.source = [{ name = "math", ratio = 1.0, env.taskset.id = "math" }]
"""


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """The command on files of these texts: its status, stdout and stderr."""

    def run(name: str, *texts: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        files = [tmp_path / f"{number}.toml" for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        more = ["--from", "prime-rl"] if name == "migrate" else ["--python", sys.executable]
        found = CliRunner().invoke(cli.app, [name, *map(str, files), *more, *options])
        error = str(found.exception) if isinstance(found.exception, ConfigError) else ""
        return (2 if error else found.exit_code, found.stdout, error)

    return run


def differences(text: str, target: str = "verl") -> list[str]:
    read = resolve("prime-rl", tomllib.loads(text))
    assert read.unread == ()
    return [str(one) for one in migrate(read.required(), target).differences]


def written(out: str) -> Any:
    """verl's config that was printed, with what a user sees of its policy, n and temperature."""
    table = yaml.safe_load(out)
    rollout = at(table, "actor_rollout_ref.rollout") or {}
    return at(table, "algorithm.composer.policy"), rollout.get("n"), rollout.get("temperature")


# --- Another loss than [trainer.loss] ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OPD, "orchestrator.algo.type = 'opd' ref_kl"),
        ('[orchestrator.algo]\ntype = "sft"', "orchestrator.algo.type = 'sft' ce"),
        ('algo.type = "opsd"\n[[train.source]]\nname = "a"', "algo.type = 'opsd' ref_kl"),
    ],
)
def test_a_run_without_rewards_is_named_first_and_gets_no_policy_loss(
    command: Run, text: str, words: str
) -> None:
    status, out, _ = command("migrate", text, options=("--to", "verl"))
    shown = [line.removeprefix("#   ") for line in out.splitlines() if line.startswith("#   ")]
    assert status == 1
    assert shown[0].startswith("policy: none, because ") and shown[0].endswith("-> ???, for you to choose")
    assert all(word in shown[0] for word in (*words.split(), "without rewards")), shown
    assert "Nothing differs" not in out and "has no option for it" not in out
    assert written(out)[0] == MISSING and "loss_agg_mode" not in out and "adv_estimator" not in out


@pytest.mark.parametrize("target", ["verl", "prime-rl"])
def test_a_config_without_a_policy_loss_does_not_run(target: str) -> None:
    objective = resolve("prime-rl", tomllib.loads(OPD)).required()
    found = migrate(objective, target)
    with pytest.raises(ConfigError, match=r"policy: .*'\?\?\?'"):
        resolve(target, found.table).required()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('loss.type = "x"', "^loss.type: 'x' is not a loss"),
        (
            'trainer.loss.type = "sft"',
            "^trainer.loss.type: 'sft' is not a loss of PRIME-RL; set one of default",
        ),
        (ORCHESTRATOR.replace("0.8", "0"), "^train.sampling.temperature: it is 0; set a"),
        (PER_SOURCE.replace("16", "0"), "^orchestrator.train.source.group_size: it is 0"),
    ],
)
def test_a_wrong_value_is_an_error_at_its_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("prime-rl", tomllib.loads(text)).required()


# --- What differs --------------------------------------------------------------------------------------

ECHO = "orchestrator.algo.type = 'echo': a cross-entropy on observation"
THEIRS = "orchestrator.train.source.algo.type = 'opd', which trains with PRIME-RL's own ref_kl"


def echo(roles: str) -> str:
    return f'[orchestrator]\ngroup_size = 4\n[orchestrator.algo]\ntype = "echo"\n{roles}\n'


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("orchestrator.algo.length_penalty = {}", "orchestrator.algo.length_penalty"),
        ("orchestrator.train.sampling.extra_body.top_p = 0.9", "extra_body.top_p = 0.9"),
        (f"{SOURCE}curriculum.sampler.type = 'difficulty_pool'", "curriculum.sampler.type"),
        ("trainer.enable_router_replay = true", "trainer.enable_router_replay = True"),
        (f'{SOURCE}curriculum.gates.g.type = "x"', "orchestrator.train.source.curriculum.gates"),
        (f'{SOURCE}algo.type = "opd"\n{SOURCE}name = "b"', THEIRS),
        (FILTER.replace("false", "true"), "post_batch_filters: 'gibberish' with enforce = true"),
        (echo("roles.user.alpha = 0.1"), f"{ECHO}.*(user 0.1)"),
        (echo("roles = { user.alpha = 0.3, tool = {} }"), f"{ECHO}.*(user 0.3, tool 0.1)"),
        (echo(""), f"{ECHO}.*(tool 0.1)"),  # PRIME-RL's default
        (echo('filter.import_path = "my.drop"'), f"{ECHO}.*(tool 0.1), of those that my.drop selects"),
    ],
)
def test_what_bears_on_the_loss_and_is_not_carried_over_is_named(text: str, remark: str) -> None:
    words = remark.split(".*")
    found = [one for one in differences(text) if one.startswith("not carried over: ")]
    assert len([one for one in found if all(word in one for word in words)]) == 1, found


@pytest.mark.parametrize(
    "text",
    [
        SAME_TWICE,
        'orchestrator.algo = { type = "max_rl" }\n[[orchestrator.train.source]]\nalgo.type = "max_rl"',
        '[[orchestrator.train.source]]\nalgo.type = "max_rl"',
        "[orchestrator]\ngroup_size = 8\n[[orchestrator.train.source]]\nname = 'a'\ngroup_size = 8",
        "[orchestrator.train.sampling]\ntemperature = 1.0\n[[orchestrator.train.source]]\nname = 'a'",
        FILTER,
        OUR_ECHO,
        USUAL,
    ],
)
def test_what_changes_nothing_is_no_difference(text: str) -> None:
    assert differences(text) == []


# --- Options of each source ----------------------------------------------------------------------------


def test_the_options_of_the_only_source_are_those_of_the_run(command: Run) -> None:
    status, out, _ = command("migrate", PER_SOURCE, options=("--to", "verl"))
    assert status == 0 and "# Nothing differs.\n" in out
    assert written(out) == ("cispo", 16, 1.3)


def test_sources_that_differ_are_each_named() -> None:
    another = '[[orchestrator.train.source]]\nname = "b"\nenv.taskset.id = "c"\n'
    found = differences(PER_SOURCE + another)
    assert found == [
        "not carried over: group_size differs by source (16 for a, 8 for b), "
        "and that of the first one is written",
        "not carried over: temperature differs by source (1.3 for a, 0.7 for b), "
        "and that of the first one is written",
    ]
    unset = "\n".join(f"[[orchestrator.train.source]]\nid = '{name}'" for name in "ab")
    assert differences(unset) == []


# --- Kinds of files ------------------------------------------------------------------------------------


def test_an_orchestrators_file_has_n_and_temperature_and_no_loss(command: Run) -> None:
    status, out, _ = command("migrate", ORCHESTRATOR, options=("--to", "verl"))
    assert status == 1 and written(out) == (MISSING, 8, 0.8)
    assert "# 1 of its properties differs:\n" in out and "Not understood" not in out
    assert "this is an orchestrator's own config, and the loss is in the trainer's file" in out
    assert at(yaml.safe_load(out), "algorithm.composer.advantage") == "dr_grpo@prime-rl"


def test_keys_of_an_own_file_are_named_as_they_stand_there() -> None:
    text = ORCHESTRATOR.replace('id = "e"', 'id = "e"\nalgo.type = "rae"\nfoo = 1')
    read = resolve("prime-rl", tomllib.loads(text))
    assert read.unread == ("train.source.foo",) and read.required().remarks == (
        "train.source.algo.type = 'rae'",
    )


def test_the_trainers_file_and_the_orchestrators_are_taken_together(command: Run) -> None:
    for texts in ((TRAINERS, ORCHESTRATOR), (ORCHESTRATOR, TRAINERS)):
        status, out, _ = command("migrate", *texts, options=("--to", "verl"))
        assert status == 0 and written(out) == ("cispo", 8, 0.8)
        status, out, _ = command("doctor", *texts)
        assert status == 0 and "nothing found" in out and "read as an rl.toml" in out


@pytest.mark.parametrize(
    "words",
    [
        "-- @ trainer.toml @ orchestrator.toml --orchestrator.group-size 4 "
        "--orchestrator.train.sampling.temperature=0.5",
        "-- --trainer @ trainer.toml --orchestrator @orchestrator.toml --orchestrator.group_size 4 "
        "--orchestrator.train.sampling.temperature 0.5 --clean",
        "trainer.toml orchestrator.toml orchestrator.group_size=4 "
        "orchestrator.train.sampling.temperature=0.5",
        "orchestrator.batch_size=8 -- @ trainer.toml @ orchestrator.toml "
        "--orchestrator.group_size 4 --orchestrator.train.sampling.temperature=0.5",
        "-- --orchestrator.train.sampling.temperature 0.5 --no-clean --orchestrator.group_size 4 "
        "@ trainer.toml "
        "@orchestrator.toml",
    ],
)
def test_a_command_line_is_taken_as_prime_rl_takes_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trainer.toml").write_text(TRAINERS)
    Path("orchestrator.toml").write_text(ORCHESTRATOR.replace("group_size = 8", 'algo = "None"'))
    found = CliRunner().invoke(cli.app, ["migrate", "--from", "prime-rl", "--to", "verl", *words.split()])
    assert written(found.stdout) == ("cispo", 4, 0.5), found.output
    assert "orchestrator.algo = 'None'" in found.stdout and found.exit_code == 1
    options = ["doctor", "--framework", "prime-rl", "--python", sys.executable, *words.split()]
    found = CliRunner().invoke(cli.app, options)
    assert found.exit_code == 0 and "read as an rl.toml" in found.stdout, found.output


@pytest.mark.parametrize(
    ("words", "key"),
    [("--framework prime-rl -- @ nowhere.toml", "nowhere.toml"), ("rl.toml --versoin 3", "--versoin")],
)
def test_a_wrong_command_line_is_named(words: str, key: str) -> None:
    found = CliRunner().invoke(cli.app, ["doctor", *words.split()])
    assert key in f"{found.exception}{found.output}" and found.exit_code


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("model.name = 'x'\nserver.port = 1\nparallel.tp = 2", "inference", "inference server's own"),
        ("[data]\ntype = 'sft'\nname = 'd'\n[model]\nname = 'x'", "sft", "for supervised training"),
    ],
)
def test_a_file_without_a_policy_loss_is_named_as_one(command: Run, text: str, kind: str, words: str) -> None:
    assert kind_of(tomllib.loads(text)) == kind
    status, out, error = command("migrate", text, options=("--to", "verl"))
    assert (status, out) == (2, "") and words in error and "give the rl.toml" in error


def test_the_kind_of_each_file() -> None:
    assert kind_of(tomllib.loads(TRAINERS)) == kind_of({"loss": {}, "data": {"fake": {}}}) == "trainer"
    assert kind_of({"model": {}}) == kind_of({"optim": {}, "loss": {}, "group_size": 2}) == "trainer"
    assert kind_of({"optim": {}, "train": {}, "algo": {}}) == "orchestrator"
    assert kind_of({"inference": {}}) == kind_of({"trainer": {}, "group_size": 2}) == "rl"
    assert kind_of({"slurm": {"job_name": "x"}}) == "rl" and kind_of({"slurm": {}, "model": {}}) == "trainer"


# --- What was assumed, and what was not understood -----------------------------------------------------


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, "PRIME-RL 0.8.1.dev52 to 0.8.1.dev67, commit 559b447 (no -"),
        ("0.9.0", "PRIME-RL 0.8.1.dev52 to 0.8.1.dev67, commit 559b447 (--version 0.9.0)"),
        ("0.8.0", "PRIME-RL 0.8.0 (--version 0.8.0)"),
    ],
)
def test_the_version_that_was_assumed_is_printed(command: Run, version: str | None, words: str) -> None:
    options = ("--to", "verl", *(("--version", version) if version else ()))
    _, out, _ = command("migrate", "orchestrator.group_size = 8", options=options)
    assert out.startswith(f"# Read as a config of {words}") and "Written for verl 0.9.1.\n" in out


def test_a_version_before_the_oldest_that_is_tested_is_one_error(command: Run) -> None:
    for name, to in (("migrate", ("--to", "verl")), ("doctor", ())):
        status, out, error = command(name, "orchestrator.group_size = 8", options=(*to, "--version", "0.7.0"))
        assert (status, out) == (2, "")
        assert error == (
            "prime-rl: PRIME-RL 0.7.0 is older than 0.8.0, the oldest that is tested; install v0.8.0 or newer"
        )


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ("[trainer.spo]\nenable = true", "trainer.spo"),
        ("[my_fork]\nalpha = 1", "my_fork"),
        ("[trainer.los]\ntype = 'ipo'", "trainer.los"),
        (f"trainer.loss = {CUSTOM[:-2]}, hint_weight = 0.1 }}", "trainer.loss.hint_weight"),
        ("[orchestrator.algo]\nlenght_penalty = {x = 1}", "orchestrator.algo.lenght_penalty"),
        ("[orchestrator.train.sampling]\ntemprature = 0.5", "orchestrator.train.sampling.temprature"),
        ("[orchestrator]\ngroupsize = 4", "orchestrator.groupsize"),
        (
            "[[orchestrator.train.source]]\nid = 'a'\nreward_scale = 2",
            "orchestrator.train.source.reward_scale",
        ),
        ("[trainer.renderer]\nx = 1\n[orchestrator.renderer]\nx = 1", "trainer.renderer"),
    ],
)
def test_a_key_that_is_not_understood_is_named_first(command: Run, more: str, unread: str) -> None:
    text = f"{more}\n[inference.model]\nname = 'x'\n[empty]\n"
    status, out, _ = command("migrate", text, options=("--to", "verl"))
    assert out.splitlines()[1] == f"# Not understood, and it may bear on the loss: {unread}"
    assert status == 1 and "Nothing differs" not in out
    assert "# Of what was understood, nothing differs.\n" in out


def test_every_key_that_is_not_carried_over_is_a_known_one() -> None:
    listed = {*keys.NOT_CARRIED, "orchestrator.group_size"}
    listed |= {f"{one}.{name}" for one in keys.SAMPLINGS for name in keys.SAMPLING_NOT_CARRIED}
    listed |= {f"{one}.algo.{name}" for one in keys.SOURCES for name in keys.ALGORITHM_NOT_CARRIED}
    assert listed <= keys.KNOWN_KEYS
