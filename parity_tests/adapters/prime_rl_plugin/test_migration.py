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
from composer_plugins.adapters.prime_rl_plugin.doctor.file import kind_of
from composer_plugins.config import at
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks import prime_rl
from composer_plugins.objective.objective import MISSING
from composer_plugins.objective.resolve import migrate, resolve

MODULE = "composer_plugins.adapters.prime_rl_plugin"
Run = Callable[..., tuple[int, str, str]]

CUSTOM = f'{{ type = "custom", import_path = "{MODULE}.cispo" }}'
OPD = 'orchestrator = { training_mode = "opd", group_size = 8 }'
MODE_AND_CUSTOM = f'orchestrator.training_mode = "opd"\ntrainer.loss = {CUSTOM}'
OWN_0_4 = 'orchestrator.rollouts_per_example = 8\ntrainer.loss.ratio_type = "token"'
SFT = 'trainer.loss.type = "sft"\norchestrator.batch_size = 8'
ORCHESTRATOR = """
batch_size = 128
group_size = 8
rollouts_per_example = 8
model.name = "x/y"
sampling.temperature = 0.8
[[env]]
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
[[orchestrator.train.env]]
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


def differences(text: str, target: str = "verl", version: str | None = None) -> list[str]:
    read = resolve("prime-rl", tomllib.loads(text), version)
    assert read.unread == ()
    return [str(one) for one in migrate(read.required(), target, version).differences]


def written(out: str) -> Any:
    """verl's config that was printed, with what a user sees of its policy, n and temperature."""
    table = yaml.safe_load(out)
    rollout = at(table, "actor_rollout_ref.rollout") or {}
    return at(table, "algorithm.composer.policy"), rollout.get("n"), rollout.get("temperature")


# --- Another loss than [trainer.loss] ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (OPD, "0.6.0", "orchestrator.training_mode = 'opd' opd_loss_fn"),
        (OPD, None, "orchestrator.training_mode = 'opd' opd_loss_fn"),
        (OPD.replace('"opd"', '"sft"'), "0.6.0", "orchestrator.training_mode = 'sft' sft_loss_fn"),
        (MODE_AND_CUSTOM, "0.6.0", "orchestrator.training_mode = 'opd' opd_loss_fn"),
        ('[orchestrator.algo]\ntype = "opd"', None, "orchestrator.algo.type = 'opd' ref_kl"),
        ('[orchestrator.algo]\ntype = "sft"', "0.7.0", "orchestrator.algo.type = 'sft' ce"),
        ('algo.type = "opsd"\n[[train.source]]\nname = "a"', None, "algo.type = 'opsd' ref_kl"),
        (SFT, "0.5.0", "trainer.loss.type = 'sft' cross-entropy"),
        (SFT, None, "trainer.loss.type = 'sft' cross-entropy"),
    ],
)
def test_a_run_without_rewards_is_named_first_and_gets_no_policy_loss(
    command: Run, text: str, version: str | None, words: str
) -> None:
    options = ("--to", "verl", *(("--version", version) if version else ()))
    status, out, _ = command("migrate", text, options=options)
    shown = [line.removeprefix("#   ") for line in out.splitlines() if line.startswith("#   ")]
    assert status == 1
    assert shown[0].startswith("policy: none, because ") and shown[0].endswith("-> ???, for you to choose")
    assert all(word in shown[0] for word in (*words.split(), "without rewards")), shown
    assert "Nothing differs" not in out and "has no option for it" not in out
    assert written(out)[0] == MISSING and "loss_agg_mode" not in out and "adv_estimator" not in out


@pytest.mark.parametrize("target", ["verl", "prime-rl"])
def test_a_config_without_a_policy_loss_does_not_run(target: str) -> None:
    objective = resolve("prime-rl", tomllib.loads(OPD), "0.6.0").required()
    found = migrate(objective, target)
    with pytest.raises(ConfigError, match=r"policy: .*'\?\?\?'"):
        resolve(target, found.table).required()


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (OPD.replace("opd", "odp"), "0.6.0", "^orchestrator.training_mode: unknown mode 'odp'"),
        (SFT, "0.6.0", "^trainer.loss.type: 'sft' is not .* 0.6: PRIME-RL 0.5 has it.*default, ipo, custom"),
        (SFT, "0.8.0", "^trainer.loss.type: .* PRIME-RL 0.7: PRIME-RL 0.5 has it"),
        ('trainer.loss.type = "icepop"', "0.6.0", "'icepop' is not .* of PRIME-RL 0.6: .*#3526 and later"),
        ('loss.type = "x"', None, "^loss.type: 'x' is not a loss"),
        (ORCHESTRATOR.replace("0.8", "0"), None, "^sampling.temperature: it is 0; set a"),
        (PER_SOURCE.replace("16", "0"), None, "^orchestrator.train.source.group_size: it is 0"),
    ],
)
def test_a_wrong_value_is_an_error_at_its_key(text: str, version: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("prime-rl", tomllib.loads(text), version).required()


# --- What differs --------------------------------------------------------------------------------------

ECHO = "orchestrator.algo.type = 'echo': a cross-entropy on observation"
TOKENS, BATCHES = "divides by this rank's tokens", "divides by the number of micro-batches"
THEIRS = "orchestrator.train.source.algo.type = 'opd', which trains with PRIME-RL's own ref_kl"


def echo(roles: str) -> str:
    return f'[orchestrator]\ngroup_size = 4\n[orchestrator.algo]\ntype = "echo"\n{roles}\n'


@pytest.mark.parametrize(
    ("text", "remark", "version"),
    [
        ("orchestrator.algo.length_penalty = {}", "orchestrator.algo.length_penalty", None),
        ('orchestrator.algo.loss_aggregation = "prompt"', "orchestrator.algo.loss_aggregation", None),
        ("orchestrator.advantage.length_weighted_baseline = true", "length_weighted_baseline", None),
        ("orchestrator.advantage.length_shaping_alpha = 0.5", "length_shaping_alpha", None),
        ('orchestrator.advantage = "None"', "orchestrator.advantage = 'None'", None),
        ("orchestrator.train.sampling.extra_body.top_p = 0.9", "extra_body.top_p = 0.9", None),
        ("orchestrator.sampling.temp_scheduler.type = 'x'", "orchestrator.sampling.temp_scheduler", None),
        ("orchestrator.buffer.online_difficulty_filtering = true", "difficulty_filtering = True", None),
        ("orchestrator.buffer.skip_verification = true", "buffer.skip_verification = True", None),
        ("orchestrator.buffer.easy_threshold = 0.9", "buffer.easy_threshold = 0.9", None),
        ("orchestrator.verification.enabled = false", "verification.enabled = False", None),
        (f"{SOURCE}curriculum.sampler.type = 'difficulty_pool'", "curriculum.sampler.type", None),
        ("trainer.enable_router_replay = true", "trainer.enable_router_replay = True", None),
        (f'{SOURCE}curriculum.gates.g.type = "x"', "orchestrator.train.source.curriculum.gates", None),
        (f'{SOURCE}algo.type = "opd"\n{SOURCE}name = "b"', THEIRS, None),
        (FILTER.replace("false", "true"), "post_batch_filters: 'gibberish' with enforce = true", None),
        (echo("roles.user.alpha = 0.1"), f"{ECHO}.*(user 0.1)", None),
        (echo("roles = { user.alpha = 0.3, tool = {} }"), f"{ECHO}.*(user 0.3, tool 0.1)", None),
        (echo(""), f"{ECHO}.*(tool 0.1)", None),  # PRIME-RL's default
        (echo('filter.import_path = "my.drop"'), f"{ECHO}.*(tool 0.1), of those that my.drop selects", None),
        # Denominators of old trainers.
        (OWN_0_4, f"PRIME-RL 0.4 {TOKENS}", "0.4.0"),
        ("orchestrator.batch_size = 8", f"PRIME-RL 0.4 {TOKENS}", "0.4.0"),
        (OWN_0_4.replace("token", "sequence"), f"PRIME-RL 0.4 {BATCHES}", "0.4.0"),
        (OWN_0_4.replace("token", "sequence"), "0.4 divides the loss of each sequence by its num", "0.4.0"),
        (f"trainer.loss = {CUSTOM}", f"PRIME-RL 0.4 {BATCHES}", "0.4.0"),
        (f"trainer.loss = {CUSTOM}", f"PRIME-RL 0.5 {TOKENS}", "0.5.0"),
        ("orchestrator.batch_size = 8", f"PRIME-RL 0.5 {TOKENS}", "0.5.0"),
        ("orchestrator.trajectory_strategy = 'interleaved'", f"PRIME-RL 0.4 {TOKENS}", None),
    ],
)
def test_what_bears_on_the_loss_and_is_not_carried_over_is_named(
    text: str, remark: str, version: str | None
) -> None:
    words = remark.split(".*")
    found = [one for one in differences(text, version=version) if one.startswith("not carried over: ")]
    assert len([one for one in found if all(word in one for word in words)]) == 1, found


@pytest.mark.parametrize(
    "text",
    [
        SAME_TWICE,
        'orchestrator.advantage = { type = "default" }',
        'orchestrator.advantage = { type = "default" }\n'
        '[[orchestrator.train.env]]\nid = "e"\nadvantage.type = "default"',
        'orchestrator.algo.type = "grpo"\n[[orchestrator.env]]\nid = "e"\nadvantage = { type = "default" }',
        'orchestrator.algo = { type = "max_rl" }\n[[orchestrator.train.source]]\nalgo.type = "max_rl"',
        '[[orchestrator.train.source]]\nalgo.type = "max_rl"',
        'orchestrator.algo = { type = "grpo", loss_aggregation = "token", length_weighted_baseline = false }',
        "[orchestrator]\ngroup_size = 8\n[[orchestrator.train.source]]\nname = 'a'\ngroup_size = 8",
        "[orchestrator.train.sampling]\ntemperature = 1.0\n[[orchestrator.train.source]]\nname = 'a'",
        "[[orchestrator.env]]\nid = 'a'\nsampling.temperature = 1.0\n[[orchestrator.env]]\nid = 'b'",
        OPD.replace("opd", "rl"),
        FILTER,
        OUR_ECHO,
        USUAL,
    ],
)
def test_what_changes_nothing_is_no_difference(text: str) -> None:
    assert differences(text) == []


# --- Options of each source ----------------------------------------------------------------------------


@pytest.mark.parametrize("listed", ["train.source", "train.env"])
def test_the_options_of_the_only_source_are_those_of_the_run(command: Run, listed: str) -> None:
    text = PER_SOURCE.replace("train.source", listed)
    status, out, _ = command("migrate", text, options=("--to", "verl"))
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
    unset = "\n".join(f"[[orchestrator.env]]\nid = '{name}'" for name in "ab")
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
    assert read.unread == ("env.foo",) and read.required().remarks == ("env.algo.type = 'rae'",)


def test_the_trainers_file_and_the_orchestrators_are_taken_together(command: Run) -> None:
    for texts in ((TRAINERS, ORCHESTRATOR), (ORCHESTRATOR, TRAINERS)):
        status, out, _ = command("migrate", *texts, options=("--to", "verl"))
        assert status == 0 and written(out) == ("cispo", 8, 0.8)
        status, out, _ = command("doctor", *texts)
        assert status == 0 and "nothing found" in out and "read as an rl.toml" in out


@pytest.mark.parametrize(
    "words",
    [
        "@ trainer.toml @ orchestrator.toml --orchestrator.group-size 4 "
        "--orchestrator.sampling.temperature=0.5",
        "--trainer @ trainer.toml --orchestrator @orchestrator.toml --orchestrator.group_size 4 "
        "--orchestrator.sampling.temperature 0.5 --clean",
        "trainer.toml orchestrator.toml orchestrator.group_size=4 orchestrator.sampling.temperature=0.5",
        "@ trainer.toml orchestrator.toml --orchestrator.rollouts-per-example 8 orchestrator.group_size=4 "
        "orchestrator.sampling.temperature=0.5",
        "--orchestrator.sampling.temperature 0.5 --no-clean --orchestrator.group_size 4 @ trainer.toml "
        "@orchestrator.toml",
    ],
)
def test_a_command_line_is_taken_as_prime_rl_takes_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trainer.toml").write_text(TRAINERS)
    Path("orchestrator.toml").write_text(ORCHESTRATOR.replace("group_size = 8", 'advantage = "None"'))
    found = CliRunner().invoke(cli.app, ["migrate", "--from", "prime-rl", "--to", "verl", *words.split()])
    assert written(found.stdout) == ("cispo", 4, 0.5), found.output
    assert "orchestrator.advantage = 'None'" in found.stdout and found.exit_code == 1
    options = ["doctor", "--python", sys.executable, *words.split()]
    found = CliRunner().invoke(cli.app, options)
    assert found.exit_code == 0 and "read as an rl.toml" in found.stdout, found.output


@pytest.mark.parametrize(
    ("words", "key"),
    [("@ nowhere.toml", "nowhere.toml"), ("rl.yaml --versoin 3 --framework trl", "--versoin")],
)
def test_a_wrong_command_line_is_named(words: str, key: str) -> None:
    found = CliRunner().invoke(cli.app, ["doctor", *words.split()])
    assert key in f"{found.exception}{found.stdout}" and found.exit_code


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
    assert kind_of({"optim": {}, "env": [], "sampling": {}}) == "orchestrator"
    assert kind_of({"inference": {}}) == kind_of({"trainer": {}, "group_size": 2}) == "rl"
    assert kind_of({"slurm": {"job_name": "x"}}) == "rl" and kind_of({"slurm": {}, "model": {}}) == "trainer"


# --- What was assumed, and what was not understood -----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version", "words"),
    [
        (SFT.replace("sft", "default"), None, "PRIME-RL 0.8.1.dev52 to 0.8.1.dev67, commit 559b447 (no -"),
        ("orchestrator.group_size = 8", "0.5.0", "PRIME-RL 0.5, before 0.6 (--version 0.5.0)"),
        ("orchestrator.group_size = 8", "HEAD", "PRIME-RL after #3586 (--version HEAD)"),
        ('trainer.loss.type = "icepop"', None, "PRIME-RL after #3586 (no --version is given)"),
        (OPD, None, "PRIME-RL 0.6, before 0.7 (no --version is given)"),
        (SFT, None, "PRIME-RL 0.5, before 0.6 (no --version is given)"),
    ],
)
def test_the_version_that_was_assumed_is_printed(
    command: Run, text: str, version: str | None, words: str
) -> None:
    options = ("--to", "verl", *(("--version", version) if version else ()))
    _, out, _ = command("migrate", text, options=options)
    assert out.startswith(f"# Read as a config of {words}") and "Written for verl 0.9.1.\n" in out


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ("[trainer.spo]\nenable = true", "trainer.spo"),
        ("[my_fork]\nalpha = 1", "my_fork"),
        ("[trainer.los]\ntype = 'ipo'", "trainer.los"),
        (f"trainer.loss = {CUSTOM[:-2]}, hint_weight = 0.1 }}", "trainer.loss.hint_weight"),
        ("[orchestrator.algo]\nlenght_penalty = {x = 1}", "orchestrator.algo.lenght_penalty"),
        ("[orchestrator.sampling]\ntemprature = 0.5", "orchestrator.sampling.temprature"),
        ("[orchestrator]\ngroupsize = 4", "orchestrator.groupsize"),
        ("[[orchestrator.env]]\nid = 'a'\nreward_scale = 2", "orchestrator.env.reward_scale"),
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
    keys = {*prime_rl.NOT_CARRIED, prime_rl.TRAINING_MODE, "orchestrator.group_size"}
    keys |= {f"{one}.{name}" for one in prime_rl.SAMPLINGS for name in prime_rl.SAMPLING_NOT_CARRIED}
    keys |= {f"{one}.algo.{name}" for one in prime_rl.SOURCES for name in prime_rl.ALGORITHM_NOT_CARRIED}
    assert keys <= prime_rl.KNOWN_KEYS
