"""What PRIME-RL trains beside and instead of [trainer.loss]: `migrate` names it.

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
from composer_plugins.adapters.prime_rl_plugin.files import without_none
from composer_plugins.config import at
from composer_plugins.errors import ConfigError
from composer_plugins.objective.objective import MISSING
from composer_plugins.objective.resolve import migrate, resolve

MODULE = "composer_plugins.adapters.prime_rl_plugin"
Run = Callable[..., tuple[int, str, str]]

CISPO = 'kwargs = { policy = "cispo", old_policy = "rollout" }'
CUSTOM = f'{{ type = "custom", import_path = "{MODULE}.loss_fn", {CISPO} }}'
OPD = 'orchestrator = { algo.type = "opd", group_size = 8 }'
ORCHESTRATOR = """
batch_size = 128
group_size = 8
model.name = "x/y"
train.sampling.temperature = 0.8
[[train.source]]
name = "e"
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
sampling.temperature = 1.3
"""
SAME_TWICE = """
[orchestrator]
group_size = 4
algo.type = "grpo"
[[orchestrator.train.source]]
name = "e"
algo.type = "grpo"
"""
SOURCE = "[[orchestrator.train.source]]\n"
FILTER = '[[orchestrator.post_batch_filters]]\ntype = "gibberish"\nenforce = false'
OUR_ECHO = """
[orchestrator.algo]
type = "echo"
filter = { import_path = "composer_plugins.recipes.prime_rl.stored_stamps.echo_filter", kwargs.store = "s" }
"""


@pytest.fixture
def command(tmp_path: Path) -> Run:
    """`migrate` on a file of this text: its status, stdout and stderr."""

    def run(text: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        (tmp_path / "a.toml").write_text(text)
        words = ["migrate", str(tmp_path / "a.toml"), "--from", "prime-rl", "--to", "verl", *options]
        found = CliRunner().invoke(cli.app, words)
        error = str(found.exception) if isinstance(found.exception, ConfigError) else ""
        return (2 if error else found.exit_code, found.stdout, error)

    return run


def differences(text: str, target: str = "verl") -> list[str]:
    read = resolve("prime-rl", tomllib.loads(text)).required()
    return [str(one) for one in migrate(read, target).differences]


def written(out: str) -> Any:
    """verl's config that was printed, with what a user sees of its policy, n and temperature."""
    table = yaml.safe_load(out)
    rollout = at(table, "actor_rollout_ref.rollout") or {}
    return at(table, "algorithm.composer.policy"), rollout.get("n"), rollout.get("temperature")


# --- Another loss than [trainer.loss] ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OPD, "algo.type = 'opd' ref_kl"),
        ('[orchestrator.algo]\ntype = "sft"', "algo.type = 'sft' ce"),
        ('orchestrator.algo.type = "opsd"\n[[orchestrator.train.source]]\nname = "a"', "'opsd' of a, ref_kl"),
    ],
)
def test_a_run_without_rewards_is_named_first_and_gets_no_policy_loss(
    command: Run, text: str, words: str
) -> None:
    status, out, _ = command(text)
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
        ('loss.type = "x"', "^loss.type: unknown loss 'x'"),
        ('trainer.loss.type = "sft"', "^trainer.loss.type: unknown loss 'sft'; known: custom, default, ipo"),
        ("orchestrator.train.sampling.temperature = 0", "^orchestrator.train.sampling.temperature: it is 0"),
        ("trainer.loss.dppo_mask_low = -1.5", "^trainer.loss.dppo_mask_low: it is -1.5; set a finite number"),
        ('trainer.loss.dppo_mask_low = "0.3"', "^trainer.loss.dppo_mask_low: it is '0.3'; set a finite"),
        (PER_SOURCE.replace("16", "0"), "^orchestrator.train.source.group_size: it is 0"),
    ],
)
def test_a_wrong_value_is_an_error_at_its_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve("prime-rl", tomllib.loads(text)).required()


# --- What differs --------------------------------------------------------------------------------------

ECHO = "algo.type = 'echo' of source 1, which trains a cross-entropy on observation tokens too"
THEIRS = "algo.type = 'opd' of a, which trains with PRIME-RL's own ref_kl"


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("orchestrator.algo.length_penalty = {}", "orchestrator.algo.length_penalty = {}"),
        ("orchestrator.train.sampling.extra_body.top_p = 0.9", "extra_body.top_p = 0.9"),
        (f"{SOURCE}sampling.top_k = 5", "orchestrator.train.source.sampling.top_k = 5"),
        (f"{SOURCE}curriculum.sampler.type = 'difficulty_pool'", "curriculum.sampler.type"),
        ("trainer.enable_router_replay = true", "trainer.enable_router_replay = True"),
        (f'{SOURCE}curriculum.gates.g.type = "x"', "orchestrator.train.source.curriculum.gates"),
        (f'{SOURCE}name = "a"\nalgo.type = "opd"\n{SOURCE}name = "b"', THEIRS),
        (FILTER.replace("false", "true"), "post_batch_filters: 'gibberish' with enforce = true"),
        ('orchestrator.algo.type = "echo"', ECHO),
        ('orchestrator.algo = { type = "echo", filter.import_path = "my.drop" }', ECHO),
        ('orchestrator.algo.type = "rae"', "algo.type = 'rae'"),
        (
            f'{SOURCE}algo.type = "max_rl"\n{SOURCE}name = "b"',
            "algo.type differs by source (max_rl for source 1",
        ),
    ],
)
def test_what_bears_on_the_loss_and_is_not_carried_over_is_named(text: str, remark: str) -> None:
    found = [one for one in differences(text) if one.startswith("not carried over: ")]
    assert len([one for one in found if remark in one]) == 1, found


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
    ],
)
def test_what_changes_nothing_is_no_difference(text: str) -> None:
    assert differences(text) == []


# --- Options of each source ----------------------------------------------------------------------------


def test_the_options_of_the_only_source_are_those_of_the_run(command: Run) -> None:
    status, out, _ = command(PER_SOURCE)
    assert status == 0 and " differs.\n" in out
    assert written(out) == ("cispo", 16, 1.3)


def test_sources_that_differ_are_each_named() -> None:
    another = '[[orchestrator.train.source]]\nname = "b"\n'
    found = differences(PER_SOURCE + another)
    assert found == [
        "not carried over: group_size differs by source (16 for a, 8 for b), "
        "and the value of the first source is written",
        "not carried over: sampling.temperature differs by source (1.3 for a, 0.7 for b), "
        "and the value of the first source is written",
    ]
    same = differences(PER_SOURCE + another.replace('"b"', '"a"'))
    assert "group_size differs by source (16 for a, 8 for a)" in same[0]
    unset = "\n".join(f"[[orchestrator.train.source]]\nname = '{name}'" for name in "ab")
    assert differences(unset) == []


# --- Files and command lines ---------------------------------------------------------------------------


def test_a_trainers_own_file_says_nothing_of_the_group() -> None:
    read = resolve("prime-rl", tomllib.loads(TRAINERS)).required()
    assert read.policy.name == "cispo" and read.group_size is None


def test_an_orchestrators_own_file_is_not_taken_for_a_config(command: Run) -> None:
    status, out, error = command("group_size = 8\nbatch_size = 128")
    assert (status, out) == (2, "") and "--from: the config has none of prime-rl's tables" in error


@pytest.mark.parametrize(
    "words",
    [
        "-- --trainer @ trainer.toml --orchestrator @orchestrator.toml --orchestrator.group-size 4 "
        "--orchestrator.train.sampling.temperature 0.5 --clean",
        "rl.toml orchestrator.group_size=4 orchestrator.train.sampling.temperature=0.5",
        "orchestrator.batch_size=8 -- @ rl.toml --orchestrator.group_size 4 @ more.toml --no-clean",
    ],
)
def test_a_command_line_is_taken_as_prime_rl_takes_it(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trainer.toml").write_text(TRAINERS)
    Path("orchestrator.toml").write_text(ORCHESTRATOR)
    Path("rl.toml").write_text(f"trainer.loss = {CUSTOM}\norchestrator.group_size = 8\ntrainer.x = 'None'")
    Path("more.toml").write_text("orchestrator.train.sampling.temperature = 0.5\n")
    found = CliRunner().invoke(cli.app, ["migrate", "--from", "prime-rl", "--to", "verl", *words.split()])
    assert written(found.stdout) == ("cispo", 4, 0.5), found.output
    options = ["doctor", "--framework", "prime-rl", "--python", sys.executable, *words.split()]
    found = CliRunner().invoke(cli.app, options)
    assert found.exit_code == 0 and "nothing found, against our options" in found.stdout, found.output


def test_the_text_none_is_null_but_for_the_kwargs_of_a_function() -> None:
    table = {"a": "None", "b": [{"c": "None"}], "kwargs": {"x": "None"}}
    assert without_none(table) == {"a": None, "b": [{"c": None}], "kwargs": {"x": "None"}}


@pytest.mark.parametrize(
    ("words", "key"),
    [("--framework prime-rl -- @ nowhere.toml", "nowhere.toml"), ("rl.toml --versoin 3", "--versoin")],
)
def test_a_wrong_command_line_is_named(words: str, key: str) -> None:
    found = CliRunner().invoke(cli.app, ["doctor", *words.split()])
    assert key in f"{found.exception}{found.output}" and found.exit_code


def test_the_versions_that_were_read_and_written_are_printed(command: Run) -> None:
    _, out, _ = command("orchestrator.group_size = 8")
    head = "# Read as a config of PRIME-RL 0.8.0 to 0.8.1.dev67, commit 559b447. Written for verl 0.9.1.\n"
    assert out.startswith(head)
    status, out, error = command("orchestrator.group_size = 8", options=("--version", "0.7.0"))
    assert (status, out) == (2, "")
    assert error == (
        "prime-rl: PRIME-RL 0.7.0 is older than 0.8.0, the oldest that is tested; install v0.8.0 or newer"
    )


@pytest.mark.parametrize(
    ("more", "unread"),
    [
        ("[trainer.spo]\nenable = true", "trainer.spo"),
        ("[my_fork]\nalpha = 1", "my_fork"),
        (f"trainer.loss = {CUSTOM[:-2]}, hint_weight = 0.1 }}", "trainer.loss.hint_weight"),
        ("[orchestrator.train.sampling]\ntemprature = 0.5", "orchestrator.train.sampling.temprature"),
        ("[[orchestrator.train.source]]\nreward_scale = 2", "orchestrator.train.source.reward_scale"),
    ],
)
def test_a_key_that_is_not_looked_at_is_listed(more: str, unread: str) -> None:
    found = resolve("prime-rl", tomllib.loads(f"{more}\n[orchestrator]\ngroup_size = 2")).unread
    assert len(found) == 1 and found[0].startswith(unread)
    assert resolve("prime-rl", tomllib.loads(TRAINERS)).unread == ("max_steps", "model.name")
