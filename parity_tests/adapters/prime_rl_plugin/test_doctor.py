"""`composer-plugins doctor` on PRIME-RL's TOML: our loss, PRIME-RL's own classes, interpreters, the command.

What it says of each mistake in our options is recorded: test_mistakes.py.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from composer_plugins.adapters.prime_rl_plugin import doctor, upstream
from composer_plugins.adapters.prime_rl_plugin.doctor import probe
from composer_plugins.cli import app
from composer_plugins.doctor import Target
from composer_plugins.errors import ConfigError, Finding
from parity_tests.cases.prime_rl import FUNCTION, POLICY, SOUND, edited, examined
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_checkout import checkout, with_checkout

RECIPES = sorted((ROOT / "recipes" / "prime_rl").glob("*.toml"))
CUSTOM = '[trainer.loss]\ntype = "custom"\nimport_path = "{}"'


def find(text: str, version: str | None = None, **given: Any) -> list[Finding]:
    """The findings in a file of this text."""
    return list(examined(text, version=version, **given).findings)


@pytest.mark.parametrize(
    "edits",
    [
        "",
        f"{POLICY} => hint_weight = 0.1; replay_weight = 1",
        f'{FUNCTION} => import_path = "json.dumps" & {POLICY} => anything = [1]',  # a loss of somebody else's
        "[trainer.loss] => [trainer.model]; x = 1; [trainer.loss] & group_size => batch_sise = 3; group_size",
    ],
)
def test_nothing_is_found_where_our_loss_is_sound(edits: str) -> None:
    assert find(edited(edits)) == []


def test_a_trainers_own_file_has_its_loss_at_the_top() -> None:
    text = f'loss.type = "custom"\nloss.{FUNCTION}\nloss.kwargs.polcy = "cispo"'
    assert [one.key for one in find(text)] == ["loss.kwargs.polcy"]
    assert [one.key for one in find('loss.type = "ipo"')] == ["loss"]


def test_several_files_are_merged_from_left_to_right() -> None:
    over = "[trainer.loss.kwargs]\npolcy = 3"
    assert [one.key for one in examined(SOUND, over).findings] == ["trainer.loss.kwargs.polcy"]
    assert examined(over, SOUND.replace(POLICY, "polcy = 'None'")).findings[0].problem.startswith("unknown")


def test_a_loss_of_prime_rls_own_is_named() -> None:
    for text in ("[trainer.optim]\nlr = 1e-6", '[trainer.loss]\ntype = "ipo"', "[orchestrator]"):
        (found,) = find(text)
        assert (found.severity, found.key) == ("warning", "trainer.loss")
        assert "PRIME-RL trains with its own loss" in found.problem


def test_a_file_without_any_of_its_tables_is_one_error() -> None:
    for text in ("[project]\nname = 'x'", "group_size = 8\n[[env]]\nid = 'x'"):
        with pytest.raises(ConfigError, match=r"FILE: the config has none of .*--orchestrator @ FILE"):
            find(text)


def test_the_version_that_is_given_wins_over_the_installed_one() -> None:
    with pytest.raises(ConfigError, match="PRIME-RL 0.6.0 is older than 0.8.0"):
        find(SOUND, prime_rl=["0.6.0", False])
    assert find(SOUND, "559b447", prime_rl=["0.6.0", True]) == []
    with pytest.raises(ConfigError, match="--version: '' is not a version; write 0.8.0"):
        find(SOUND, "")


@pytest.mark.parametrize(("version", "is_later"), [("0.9.0", False), ("0.8.1", False), (None, True)])
def test_a_version_that_is_newer_than_tested_is_warned_of(version: str | None, is_later: bool) -> None:
    (newer,) = find(SOUND, version, prime_rl=["0.8.0", is_later])
    assert (newer.severity, newer.key) == ("warning", "prime-rl")
    assert "newer than the newest that was tested, 0.8.1.dev67 (commit 559b447)" in newer.problem


@pytest.mark.parametrize(("words", "is_later"), [("def default_loss_fn(", False), ("class IPOLoss", True)])
def test_a_later_release_is_told_by_its_source(words: str, is_later: bool, modules: Path) -> None:
    """Its metadata say 0.8.0, and it is not imported."""
    (modules / "prime_rl" / "trainer" / "rl").mkdir(parents=True)
    (modules / "prime_rl" / "__init__.py").write_text("raise SystemExit('imported')")
    (modules / "prime_rl" / "trainer" / "rl" / "loss.py").write_text(words)
    found = find(CUSTOM.format("pkg.mod.loss_fn"), python=sys.executable)
    assert [one.key for one in found] == ["prime-rl"] * is_later


# --- the interpreter that will train ---------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("pkg.nowhere.fn", "No module named 'pkg.nowhere' install the module for"),
        ("pkg.mod.los_fn", "no attribute 'los_fn' only after the model is loaded"),
        ("pkg.mod.number", "not a function, but of type int"),
        ("pkg.mod:loss_fn", "no attribute write module.function"),
        ("pkg.broken.fn", "No module named 'not_there_at_all'"),
        ("", "ValueError did you mean loss_fn"),
        ("composer_plugins.adapters.prime_rl_plugin", "no attribute loss_fn"),
        ("composer_plugins.adapters.prime_rl_plugin:loss_fn", "no attribute did you mean loss_fn"),
        ("composer_plugins.adapters.prime_rl_plugin.ppo", 'loss_fn" and kwargs.policy = "ppo"'),
        ("composer_plugins.kernels.policy.grpo", "cannot be called with PRIME-RL's LossInputs"),
    ],
)
def test_an_import_path_is_looked_up_as_prime_rl_does(modules: Path, path: str, words: str) -> None:
    (found,) = find(CUSTOM.format(path), python=sys.executable)
    assert (found.key, found.severity) == ("trainer.loss.import_path", "error")
    said = f"{found.problem} {found.remedy}"
    assert all(word in said for word in words.split()), said


def test_an_interpreter_without_this_package_is_found(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd / && exec "{sys.executable}" -I -S "$@"\n')
    python.chmod(0o755)
    (found,) = find(SOUND, python=str(python))
    assert (found.key, found.severity) == ("trainer.loss.import_path", "error")
    assert "No module named 'composer_plugins'" in found.problem
    assert f"uv pip install --python {python} composer-plugins" in found.remedy


def test_what_is_no_interpreter_is_one_error() -> None:
    with pytest.raises(ConfigError, match=r"--python: /nowhere/python cannot be run: No such file"):
        find(SOUND, python="/nowhere/python")
    with pytest.raises(ConfigError, match=r"--python: /bin/true is not a Python that answers \(status 0"):
        find(SOUND, python="/bin/true")


def test_the_probe_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse((ROOT / "adapters" / "prime_rl_plugin/doctor/probe.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names


# --- PRIME-RL's own classes ------------------------------------------------------------------------------

RL_CONFIG = """
from pydantic import BaseModel, model_validator

class Source(BaseModel, extra="forbid"):
    name: str
    env: dict = {}

class Train(BaseModel, extra="forbid"):
    source: list[Source] = []

class Orchestrator(BaseModel, extra="forbid"):
    group_size: int = 1
    train: Train = Train()

class RLConfig(BaseModel, extra="forbid"):
    model: dict = {}
    trainer: dict = {}
    orchestrator: Orchestrator = Orchestrator()
    max_steps: int | None = None

    @model_validator(mode="before")
    def moved(cls, data):
        return {**data, "trainer": data.pop("trainer", {})}

    @model_validator(mode="after")
    def whole(self):
        if self.max_steps == 13:
            raise ValueError("13 steps are unlucky")
        return self
"""


@pytest.fixture
def own_class(modules: Path) -> Path:
    """PRIME-RL's package with the class of the config, for every interpreter that is asked."""
    folder = modules / "prime_rl" / "configs"
    folder.mkdir(parents=True)
    (folder / "rl.py").write_text(RL_CONFIG)
    return folder


def test_its_own_class_is_asked_and_what_it_rejects_is_an_error(own_class: Path) -> None:
    assert find(SOUND, python=sys.executable) == []
    text = edited('group_size = 8 => group_size = "many"; batch_sise = 8 & name = "mine" => nme = 3')
    found = {one.key: one for one in find(f"max_step = 3\n{text}", python=sys.executable)}
    wrong = {"group_size", "batch_sise", "train.source.nme", "train.source.name"}
    assert found.keys() == {"max_step", *(f"orchestrator.{name}" for name in wrong)}
    assert {one.severity for one in found.values()} == {"error"}
    assert found["orchestrator.group_size"].problem.startswith("PRIME-RL rejects it: Input should be a valid")
    (whole,) = find(f"max_steps = 13\n{SOUND}", python=sys.executable)
    assert whole.key == "the file" and "13 steps are unlucky" in whole.problem


def test_its_own_class_is_not_asked_for_another_version(own_class: Path) -> None:
    for version, errors in ((None, ["surplus"]), ("0.8.1.dev52", [])):
        found = examined(f"surplus = 3\n{SOUND}", version=version, python=sys.executable)
        assert [one.key for one in found.findings if one.severity == "error"] == errors
        assert found.against.endswith("PRIME-RL's own RLConfig checked the others") is (version is None)


def test_a_class_that_does_not_import_is_not_asked(own_class: Path) -> None:
    for text in ("import not_there", "raise SystemExit(3)", "RLConfig = 3"):
        (own_class / "rl.py").write_text(text)
        found = examined(f"surplus = 3\n{SOUND}", python=sys.executable)
        assert found.findings == () and found.against.endswith("own options were not looked at")


def test_a_location_is_written_as_in_the_file() -> None:
    config = {"trainer": {"loss": {"type": "custom"}}, "orchestrator": {"env": [{"id": 1}]}}
    assert probe.written(("trainer", "loss", "custom", "kwarg"), config) == "trainer.loss.kwarg"
    assert probe.written(("orchestrator", "env", 0, "id"), config) == "orchestrator.env.id"
    assert probe.written(("trainer", "loss", "custom", "import_path"), config) == "trainer.loss.import_path"
    assert probe.written((), config) == ""


@with_checkout
def test_its_classes_are_where_the_doctor_looks_for_them() -> None:
    for module, name in (upstream.RL_CONFIG, upstream.TRAINER_CONFIG):
        (file,) = checkout().glob(f"**/{module.replace('.', '/')}.py")
        assert f"class {name}(" in file.read_text()


# --- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_nothing_is_found_in_a_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(recipe.parent), str(ROOT)]))
    run = CliRunner().invoke(app, ["doctor", str(recipe)], catch_exceptions=False)
    assert run.exit_code == 0
    assert run.output.count("\n") == 1 and ": nothing found, against our options for PRIME-RL" in run.output


def test_findings_are_printed_with_errors_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rl.toml"
    file.write_text(edited(f'{POLICY} => policy = "cispo"; old_policy = "current"; polcy = 3'))
    facts = {"prime_rl": ["0.8.0", True], "loss": None, "rejected": None}
    monkeypatch.setattr(doctor, "ask", lambda *_: facts)
    run = CliRunner().invoke(app, ["doctor", str(file)], catch_exceptions=False)
    assert run.exit_code == 1
    assert run.output.startswith("error: trainer.loss.kwargs.polcy\n")
    assert "\nwarning: prime-rl\n" in run.output and f"\n{file}: 1 error, 1 warning, against" in run.output
    run = CliRunner().invoke(app, ["doctor", str(file), "--json", "--version", "559b447"])
    data = json.loads(run.output)
    assert data["framework"] == "prime-rl" and data["files"] == [str(file)] and "559b447" in data["against"]
    (found,) = data["findings"]
    assert found["severity"] == "error" and found["problem"] and found["remedy"]


@pytest.mark.parametrize(
    ("arguments", "status", "stream", "words"),
    [
        (["x.toml", "--framework", "oat"], 2, "stderr", "error: --framework: unknown framework 'oat'; kno"),
        (["colon.toml"], 1, "stdout", "error: trainer.loss.import_path"),
        (["nowhere.toml"], 2, "stderr", "error: nowhere.toml: cannot be read: FileNotFound"),
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


def test_a_loss_by_import_path_is_found_where_training_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_idea.py").write_text("def soft(logprobs, advantages, mask): ...\n")
    (tmp_path / "rl.toml").write_text(edited(f'{POLICY} => policy = "my_idea:soft"'))
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.examine([tmp_path / "rl.toml"], Target(sys.executable, None)).findings == ()
