"""`composer-plugins doctor` on PRIME-RL's TOML: sound files, versions, interpreters, the command.

What it says of each mistake is recorded: test_mistakes.py.
"""

import ast
import contextlib
import json
import os
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins.adapters.prime_rl_plugin import doctor as prime_rl_doctor
from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.cli import app
from composer_plugins.errors import ConfigError
from parity_tests.cases.prime_rl import (
    ABSENT,
    ECHO,
    FUNCTION,
    GRPO,
    HINT,
    HINTS,
    LOGGED,
    LOSS,
    OFF,
    PLAIN,
    POLICY,
    REPLAY,
    SOUND,
    STAMPS,
    STORE,
    aged,
    edited,
    examined,
    facts,
    find,
)
from parity_tests.cases.verl_config import changed
from parity_tests.rigs.paths import ROOT

RECIPES = sorted((ROOT / "recipes" / "prime_rl").glob("*.toml"))
BARE = f"{HINT}\n => & {REPLAY}\n =>"  # without hint and pairs
ON = f"{OFF} => filter_zero_advantages = true"
GATE = 'curriculum.gates.easy = { type = "advantage_range", reject_min = 0.1, reject_max = 1.0 }'
FOREIGN = f'{FUNCTION} => import_path = "json.dumps"'
WITH_ECHO = f"{GRPO} => {ECHO} & + {LOGGED}"
CUSTOM = '[trainer.loss]\ntype = "custom"\nimport_path = "{}"'


@pytest.mark.parametrize(
    ("edits", "version", "stamps"),
    [
        ("", None, STAMPS),
        ("", None, ["stamp_from_store"]),
        ("", None, ["loss_weights", "reference_logprobs"]),
        (WITH_ECHO, "0.8.0", STAMPS),
        (f'{GRPO} => {ECHO} & + [[orchestrator.post_batch_filters]]; type = "gibberish"', "0.8.0", STAMPS),
        (f"{BARE} & {ON}", None, []),
        (f"{BARE} & {ON}", "0.8.1.dev52", []),
        (f"env.taskset => {GATE}; env.taskset", None, STAMPS),
        (f"loss_fn => cispo & {POLICY} => policy_params.clip_high = 4.0", None, STAMPS),
        # of a loss of somebody else's no kwargs are known
        (f"{FOREIGN} & {HINT} => anything = [1, {{a = 2}}]", None, STAMPS),
        (f"{FOREIGN} & {BARE}", None, STAMPS),
        # stamps that may be of hints: a store's default kinds have both
        (f"{WITH_ECHO} & {REPLAY} =>", "0.8.0", STAMPS),
        (f'{WITH_ECHO} & {BARE} & {STORE} => {STORE}; filter.kwargs.kinds = ["reference"]', "0.8.0", STAMPS),
        (f"{REPLAY} =>", None, ["stamp_reference", "stamp_from_store"]),
        (f"{HINT} =>", None, [*STAMPS, "ref_kl"]),
    ],
)
def test_nothing_is_found_where_all_is_sound(edits: str, version: str | None, stamps: list[str]) -> None:
    assert find(aged(edited(edits), version), version, plugins={"my-env": stamps}) == []


def test_a_loss_of_somebody_elses_does_not_need_this_package() -> None:
    assert find(edited(FOREIGN), package="No module named 'composer_plugins'") == []


def test_a_trainers_own_config_has_its_loss_at_the_top() -> None:
    text = f"[loss]\n{LOSS}[loss.kwargs]\n"
    assert find(text) == []
    assert "; read as a trainer's own config" in examined(text).against


def test_several_files_are_merged_from_left_to_right() -> None:
    over = "[orchestrator.train]\nfilter_zero_advantages = true\n[trainer.loss.kwargs]\nhint_weight = 0"
    (found,) = examined(SOUND, over).findings
    assert found.key == "orchestrator.train.filter_zero_advantages"
    assert "replay_weight" in found.problem and "hint_weight" not in found.problem
    assert examined(over, SOUND).findings == ()


def test_a_loss_of_the_catalogue_as_a_function_has_its_own_remedy() -> None:
    (found,) = find(edited("loss_fn => ppo"), loss=["attribute", ["loss_fn", "dppo"]])
    assert found.remedy.endswith('.loss_fn" and kwargs.policy = "ppo"')


SHAPES = ("3", '""', "[]", '["custom"]', "[{a = 1}]", "{a = 1}", "true", "nan", '"\\u0000"', "1979-05-27")
KEYS = (
    "trainer trainer.loss.type trainer.loss.import_path trainer.loss.kwargs orchestrator orchestrator.algo "
    "orchestrator.algo.type orchestrator.algo.filter orchestrator.algo.filter.import_path "
    "orchestrator.algo.filter.kwargs orchestrator.algo.filter.kwargs.kinds orchestrator.training_mode "
    "orchestrator.train orchestrator.train.source orchestrator.train.env orchestrator.env "
    "orchestrator.train.filter_zero_advantages orchestrator.post_batch_filters orchestrator.buffer "
    "orchestrator.teacher_model deployment deployment.num_teacher_gpus loss teacher_gpu_ids "
    "orchestrator.group_size orchestrator.rollouts_per_example orchestrator.advantage "
    "orchestrator.advantage.type orchestrator.algo.filter.kwargs.store optim slurm"
)


def test_a_value_of_any_type_is_a_finding_or_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, one = tomllib.loads, dict[str, Any]()
    shapes = [loads(f"x = {shape}")["x"] for shape in SHAPES]
    monkeypatch.setattr(tomllib, "loads", lambda _: one)
    inside = [f"trainer.loss.kwargs.{name}" for name in ("policy", "hint_weight", "hint_params", "clip")]
    for key, shape in product([*KEYS.split(), *inside], shapes):
        for version in ("0.8.0", None):
            one = changed(loads(edited(f"{GRPO} => {ECHO}")), {key: shape})
            with contextlib.suppress(ConfigError):
                find("", version)


RELEASES = {
    "0.8.0": "0.8.0 v0.8.0 0.8.1.dev51",
    "0.8.1.dev52": "0.8.1.dev52+gabc 0.8.1.dev67 559b447 0.8.1.dev68 0.8.1 0.9",
}


def test_each_release_has_the_contract_of_its_generation() -> None:
    for since, releases in RELEASES.items():
        assert {upstream.generation_of(one).since for one in releases.split()} == {since}
    assert upstream.generation_of(None).since == "0.8.1.dev52"


def test_the_version_that_is_given_wins_over_the_installed_one() -> None:
    text = edited(f"{REPLAY} =>")
    with pytest.raises(ConfigError, match="PRIME-RL 0.6.0 is older than 0.8.0"):
        find(text, None, prime_rl=["0.6.0", ABSENT])
    assert find(text, "559b447", prime_rl=["0.6.0", ABSENT], plugins=HINTS) == []


@pytest.mark.parametrize("version", ["0.9.0", "0.8.1"])
def test_a_version_that_is_newer_than_tested_is_warned_of_and_a_hint_works_there(version: str) -> None:
    (newer,) = find(edited(f"{REPLAY} =>"), version, plugins=HINTS)
    assert (newer.severity, newer.key) == ("warning", "prime-rl")
    assert "newer than the newest that was tested, 0.8.1.dev67 (commit 559b447)" in newer.problem


LOSS_FILE, ROLLOUTS = "trainer/rl/loss.py", "orchestrator/trajectories.py"
OWN, FORWARDS = {LOSS_FILE: "def default_loss_fn("}, {ROLLOUTS: "node.loss_weights"}
# What is in the files of its package, and the generation with which it is compared.
TREES = {
    "0.8.0": ("0.8.0", OWN | {ROLLOUTS: "sample.rl_weights = None"}),
    "559b447": ("0.8.1.dev52", OWN | FORWARDS),
    "newer": ("0.8.1.dev52", {LOSS_FILE: "class IPOLoss"} | FORWARDS),
}


@pytest.mark.parametrize("name", TREES)
def test_the_generation_is_told_by_the_source_and_not_by_the_metadata(name: str, modules: Path) -> None:
    """And a function that is there is found, in a module that prints."""
    since, files = TREES[name]
    info = modules / "prime_rl-0.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prime-rl\nVersion: 0.8.0\n")
    for name_of_file, text in {"__init__.py": "raise SystemExit('imported')", **files}.items():
        (modules / "prime_rl" / name_of_file).parent.mkdir(parents=True, exist_ok=True)
        (modules / "prime_rl" / name_of_file).write_text(text)
    found = examined(CUSTOM.format("pkg.mod.loss_fn"), python=sys.executable)
    assert found.against.startswith(f"the contract of PRIME-RL {since} ")
    assert "its source has these features" in found.against
    keys = [one.key for one in found.findings]
    assert keys.count("prime-rl") == (name == "newer") and "trainer.loss.import_path" not in keys


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: cannot be read: FileNotFound"):
        prime_rl_doctor.read([tmp_path / "nowhere.toml"])
    with pytest.raises(ConfigError, match="rl.toml: cannot be parsed: TOML") as error:
        find("[trainer.loss\n")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="--version: '' is not a version; write 0.8.0"):
        find(SOUND, "")


# --- the interpreter that will train ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pkg.nowhere.fn", "has no module pkg.nowhere correct the path"),
        ("nowhere.mod.fn", "has no module nowhere"),
        ("pkg.mod.los_fn", "the module pkg.mod has no 'los_fn' did you mean 'loss_fn'"),
        ("pkg.mod.number", "is a int, not a function"),
        ("pkg.mod.Loss.step", "pkg.mod.Loss is not a module step = Loss().step"),
        ("pkg.broken.fn", "importing pkg.broken fails No module named 'not_there_at_all'"),
        ("composer_plugins.adapters.prime_rl_plugin", "has no 'prime_rl_plugin' name one of loss_fn,"),
        ("composer_plugins.loss_fn", "has no 'loss_fn' name one of loss_fn, prime_rl_plugin"),
        ("composer_plugins.adapters.prime_rl_plugin.cipso", "did you mean 'cispo'"),
    ],
)
def test_an_import_path_is_looked_up_as_prime_rl_does(modules: Path, path: str, words: str) -> None:
    (found,) = find(CUSTOM.format(path), python=sys.executable)
    assert (found.key, found.severity) == ("trainer.loss.import_path", "error")
    said = f"{found.problem} {found.remedy}"
    assert all(word in said for word in words.split()), said


def test_names_that_nothing_can_be_looked_up_by_are_no_traceback(modules: Path) -> None:
    (modules / "raises").mkdir()
    (modules / "raises" / "__init__.py").write_text("raise SystemExit('imported')")
    found = find(edited(f"my-env => raises.env & {REPLAY} =>"), python=sys.executable)
    assert [one.severity for one in found] == ["warning"]
    assert "raises.env is not installed" in found[0].problem
    text = edited("composer_plugins.adapters.prime_rl_plugin.loss_fn => \\u0000.loss_fn")
    assert [one.key for one in find(text, python=sys.executable)] == ["trainer.loss.import_path"]


def interpreter(tmp_path: Path, command: str) -> str:
    """An interpreter that starts in another way."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return str(program)


def test_an_environments_source_is_read_without_importing_it(modules: Path) -> None:
    source = "raise SystemExit\ndef finalize(): stamp_reference()\nx = {'ref_kl': 1}"
    (modules / "my_env.py").write_text(source)
    found = find(SOUND, python=sys.executable)
    assert [one.problem.partition(" is set")[0] for one in found] == [REPLAY]


def test_an_interpreter_without_this_package_is_found(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f'cd / && exec "{sys.executable}" -I -S "$@"')
    (found,) = find(PLAIN, python=python)
    assert (found.key, found.severity) == ("trainer.loss.import_path", "error")
    assert f"{python}, which will train, cannot import composer_plugins" in found.problem


def test_a_package_that_only_the_working_directory_has_is_found(tmp_path: Path) -> None:
    """As `python -c` in the root of a clone imports it: training starts somewhere else."""
    clone = tmp_path / "clone" / "composer_plugins"
    clone.mkdir(parents=True)
    for name in ("__init__", "errors"):
        (clone / f"{name}.py").write_text("")
    python = interpreter(tmp_path, f'cd "{clone.parent}" && exec "{sys.executable}" -S -E "$@"')
    findings = find(CUSTOM.format("composer_plugins.mine.loss_fn"), python=python)
    (found,) = [one for one in findings if "working directory" in one.problem]
    assert (found.severity, found.key) == ("warning", "trainer.loss.import_path")
    assert f"in the working directory {clone.parent} only" in found.problem


def test_what_is_no_interpreter_is_one_error() -> None:
    with pytest.raises(ConfigError, match=r"--python: /nowhere/python cannot be run: No such file"):
        find(SOUND, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"--python: /bin/true is not a Python that answers \(status 0"):
        find(SOUND, python="/bin/true")


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(recipe.parent), str(ROOT)]))
    run = CliRunner().invoke(app, ["doctor", str(recipe)], catch_exceptions=False)
    assert run.exit_code == 0
    assert run.output.count("\n") == 1 and ": nothing found, against the contract of PRIME-RL" in run.output


def test_findings_are_printed_with_errors_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(edited(f"{REPLAY} => replay_weight = 2.5 & {OFF} =>"))
    monkeypatch.setattr(prime_rl_doctor, "ask", lambda *_: facts(plugins=HINTS))
    run = CliRunner().invoke(app, ["doctor", str(file)], catch_exceptions=False)
    assert run.exit_code == 1
    assert run.output.startswith("error: orchestrator.train.filter_zero_advantages\n")
    assert "  -> set filter_zero_advantages = false in [orchestrator.train]\n" in run.output
    assert "\nwarning: orchestrator.train.source.env.taskset.id\n  replay_weight = 2.5 is set" in run.output
    assert f"\n{file}: 1 error, 1 warning, against" in run.output
    run = CliRunner().invoke(app, ["doctor", str(file), "--json", "--version", "559b447"])
    data = json.loads(run.output)
    assert data["framework"] == "prime-rl" and data["files"] == [str(file)] and "559b447" in data["against"]
    findings = {one["key"]: one for one in data["findings"]}
    found = findings["orchestrator.train.filter_zero_advantages"]
    assert len(findings) == 2 and found["severity"] == "error" and found["problem"] and found["remedy"]


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "words"),
    [
        (["x.toml", "--framework", "oat"], 2, "stderr", "error: --framework: unknown framework 'oat'; kno"),
        (["colon.toml"], 1, "stdout", "error: trainer.loss.import_path"),
    ],
)
def test_the_installed_command_ends_with_its_status(
    tmp_path: Path, arguments: list[str], status: int, stream: str, words: str
) -> None:
    (tmp_path / "colon.toml").write_text(edited("prime_rl_plugin.loss_fn => prime_rl_plugin:loss_fn"))
    command = [sys.executable, "-m", "composer_plugins", "doctor", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == status
    assert getattr(run, stream).startswith(words) and "Traceback" not in run.stderr


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "adapters" / "prime_rl_plugin/doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names
