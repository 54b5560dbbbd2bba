"""The doctor and names in PRIME-RL's TOML: misspelt, at the wrong level, rejected by its own classes.

With a checkout, no field of PRIME-RL's classes and no file of its examples is taken for misspelt.
"""

import ast
import os
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin import keys
from composer_plugins.adapters.prime_rl_plugin.doctor import examine, probe
from composer_plugins.conformance.prime_rl_claims import upstream as prime_rl_live
from composer_plugins.conformance.stubs import Empty
from composer_plugins.diagnosis import Target
from parity_tests.cases.prime_rl import PLAIN, POLICY, edited, examined, find
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.prime_rl_checkout import checkout, with_checkout

# --- PRIME-RL's own classes ------------------------------------------------------------------------------

RL_CONFIG = """
from typing import Annotated, Any, Literal
from pydantic import BaseModel, ConfigDict, Field, model_validator

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

class Default(Strict):
    type: Literal["default"] = "default"

class Custom(Strict):
    type: Literal["custom"] = "custom"
    import_path: str
    kwargs: dict[str, Any] = {}

class TrainerConfig(Strict):
    loss: Annotated[Default | Custom, Field(discriminator="type")] = Default()
    optim: dict[str, Any] = {}
    max_steps: int = 1

class Source(Strict):
    name: str
    env: dict[str, Any] = {}

class Train(Strict):
    source: list[Source] = []
    filter_zero_advantages: bool = True

class Orchestrator(Strict):
    algo: dict[str, Any] = {}
    group_size: int = Field(1, ge=1)
    train: Train = Train()

class RLConfig(Strict):
    model: dict[str, Any] = {}
    trainer: TrainerConfig = TrainerConfig()
    orchestrator: Orchestrator = Orchestrator()
    max_steps: int | None = None

    @model_validator(mode="before")
    @classmethod
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
    (folder / "trainer.py").write_text("from prime_rl.configs.rl import TrainerConfig")
    (modules / "my_env.py").write_text("")
    return folder


def test_its_own_class_is_asked_and_what_it_rejects_is_an_error(own_class: Path) -> None:
    assert find(PLAIN, python=sys.executable) == []
    text = PLAIN.replace("group_size = 8", 'group_size = "many"\nbatch_sise = 8').replace(
        'name = "mine"', 'name = "mine"\nnme = 3'
    )
    found = {one.key: one for one in find(f"max_step = 3\n{text}", python=sys.executable)}
    wrong = {"group_size", "batch_sise", "train.source.nme"}
    assert found.keys() == {"max_step", *(f"orchestrator.{name}" for name in wrong)}
    assert {one.severity for one in found.values()} == {"error"}
    assert found["orchestrator.group_size"].problem.startswith(
        "PRIME-RL rejects it: Input should be a valid int"
    )
    (needed,) = find(PLAIN.replace('name = "mine"', ""), python=sys.executable)
    assert (needed.severity, needed.key) == ("warning", "orchestrator.train.source.name")
    assert "PRIME-RL needs it: Field required" in needed.problem
    (found_here,) = find(f"max_steps = 13\n{PLAIN}", python=sys.executable)
    assert found_here.key == "the file" and "13 steps are unlucky" in found_here.problem


def test_its_own_class_is_not_asked_for_another_version(own_class: Path) -> None:
    for version, keys_of_errors in ((None, ["surplus"]), ("0.8.1.dev52", [])):
        found = examined(f"surplus = 3\n{PLAIN}", version=version, python=sys.executable)
        assert [one.key for one in found.findings if one.severity == "error"] == keys_of_errors
        assert found.against.endswith("which PRIME-RL's own RLConfig checked") is (version is None)


def test_a_class_that_does_not_import_is_not_asked(own_class: Path) -> None:
    for text in ("import not_there", "raise SystemExit(3)", "RLConfig = 3"):
        (own_class / "rl.py").write_text(text)
        found = examined(f"surplus = 3\n{PLAIN}", python=sys.executable)
        assert found.findings == () and found.against.endswith("own options were not looked at")


def test_a_location_is_written_as_in_the_file() -> None:
    config = {"trainer": {"loss": {"type": "custom"}}, "orchestrator": {"env": [{"id": 1}]}}
    assert probe.written(("trainer", "loss", "custom", "kwarg"), config) == "trainer.loss.kwarg"
    assert probe.written(("orchestrator", "env", 0, "id"), config) == "orchestrator.env.id"
    assert probe.written(("trainer", "loss", "custom", "import_path"), config) == "trainer.loss.import_path"
    assert probe.written((), config) == ""


# --- a checkout ------------------------------------------------------------------------------------------


def classes() -> dict[str, dict[str, ast.AnnAssign]]:
    """By class of the checkout's configs, its fields, with those that it inherits."""
    own, bases = dict[str, dict[str, ast.AnnAssign]](), dict[str, list[str]]()
    for file in checkout().glob("**/prime_rl/configs/*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                own[node.name] = {one.target.id: one for one in fields if isinstance(one.target, ast.Name)}
                bases[node.name] = [ast.unparse(one) for one in node.bases]

    def whole(name: str) -> dict[str, ast.AnnAssign]:
        inherited = [whole(base) for base in bases[name] if base in own]
        return {key: one for fields in (*inherited, own[name]) for key, one in fields.items()}

    return {name: whole(name) for name in own}


def tomls() -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(checkout().glob("**/*.toml")):
        if file.name != "pyproject.toml":
            yield file, tomllib.loads(file.read_text())


@with_checkout
def test_the_tables_at_the_top_are_those_of_its_two_classes() -> None:
    of_rl, trainers = classes()["RLConfig"], classes()["TrainerConfig"]
    only_rl = {*keys.RL_TABLES, keys.INFERENCE_TABLE, *keys.DEPLOYMENT_TABLES}
    assert only_rl <= of_rl.keys() - trainers.keys()
    module, name = keys.RL_CONFIG
    files = {file.stem for file in checkout().glob("**/prime_rl/configs/*.py")}
    assert {module.rpartition(".")[2], keys.TRAINER_CONFIG[0].rpartition(".")[2]} <= files
    assert name == "RLConfig" and keys.TRAINER_CONFIG[1] == "TrainerConfig"


@with_checkout
def test_a_group_has_one_completion_where_its_size_is_not_set() -> None:
    fields = classes()["OrchestratorConfig"]
    one = fields[keys.GROUP_SIZE]
    default = one.value.args[0] if isinstance(one.value, ast.Call) else one.value
    assert isinstance(default, ast.Constant) and default.value == 1


@with_checkout
def test_its_own_class_accepts_its_examples_and_rejects_a_misspelt_name() -> None:
    prime_rl_live.load(checkout())
    (source,) = checkout().glob("**/prime_rl/configs/orchestrator.py")
    absent = [name for name in prime_rl_live.STUBBED if isinstance(import_module(name), Empty)]
    if any(f"from {name}" in source.read_text() or f"import {name}" in source.read_text() for name in absent):
        pytest.skip(f"its configs import one of {absent}, which are not installed here")
    files = [(file, config) for file, config in tomls() if {"trainer", "orchestrator"} <= config.keys()]
    assert len(files) > 30
    for file, config in files:
        rejected = probe.rejected(*keys.RL_CONFIG, config)
        assert rejected == [], file
        config["trainer"]["los"] = config["trainer"].pop("loss", {})
        rejected = probe.rejected(*keys.RL_CONFIG, config)
        assert [key for key, *_ in rejected or ()] == ["trainer.los"]


def test_a_loss_that_only_the_working_directory_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH, or an installation, makes it known to every process of PRIME-RL."""
    (tmp_path / "my_idea.py").write_text("def soft(logprobs, advantages, mask): ...\n")
    (tmp_path / "rl.toml").write_text(edited(f'{POLICY} => policy = "my_idea:soft"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.key: one for one in examine([Path("rl.toml")], Target(sys.executable, None)).findings}
    assert "my_idea in the working directory" in found["trainer.loss.kwargs.policy"].problem
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    keys = {one.key for one in examine([Path("rl.toml")], Target(sys.executable, None)).findings}
    assert "trainer.loss.kwargs.policy" not in keys
