"""Plugins: a third party's loss is registered beside ours, and a broken plugin does not stop the others."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks import registry as frameworks
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.trl import TRL
from composer_plugins.hookspecs import hookimpl
from composer_plugins.losses import registry
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import add_plugin, collect, get_plugin_manager
from composer_plugins.losses.row import of_kind
from parity_tests.rigs.commands import error, invoke
from parity_tests.rigs.programs import python

GRPO = of_kind(collect(get_plugin_manager(entry_points=False)).losses, "policy")["grpo"]
MINE = replace(GRPO, name="mine", summary="a loss of mine", dialects=())


def hooks(**functions: Callable[..., None]) -> object:
    """A plugin that has these functions."""
    return type("Plugin", (), {name: staticmethod(one) for name, one in functions.items()})()


def plugin(*losses: Any, ends_with: BaseException | None = None) -> object:
    """A plugin whose hook registers these losses, and then raises."""

    @hookimpl
    def register_losses(register: Callable[[Any], None]) -> None:
        for loss in losses:
            register(loss)
        if ends_with is not None:
            raise ends_with

    return hooks(register_losses=register_losses)


def problems(*added: object) -> list[str]:
    """What is wrong with these plugins, of `dist-0 1.0`, `dist-1 1.0` ...; ours and the last one load."""
    manager = get_plugin_manager(entry_points=False)
    for i, one in enumerate(added):
        add_plugin(manager, one, f"dist-{i} 1.0")
    found = collect(manager)
    assert GRPO in found.losses and found.losses[-1].name == "mine"
    return [str(problem) for problem in found.problems]


def test_the_bundled_rows_come_through_the_hook_without_a_problem() -> None:
    found = collect(get_plugin_manager(entry_points=False))
    assert found.problems == () and set(found.origins.values()) == {"composer-plugins"}
    assert collect(get_plugin_manager(entry_points=False)) == found  # two managers share no state


def test_a_loss_of_another_distribution_is_registered_with_its_origin() -> None:
    shared_name = replace(MINE, name="jsd")  # a divergence has it: two kinds may share a name
    manager = get_plugin_manager(entry_points=False)
    add_plugin(manager, plugin(MINE, shared_name), "dist-0 1.0")
    found = collect(manager)
    assert found.losses[-2:] == (MINE, shared_name) and found.problems == ()
    assert found.origins["policy", "mine"] == "dist-0 1.0"


SAME = f"{GRPO.path} has the name of {GRPO.path}, which"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (
            hooks(register_loses=hookimpl(lambda register: None)),
            "register_loses: unknown hook 'register_loses'; did you mean 'register_losses'?",
        ),
        (
            hooks(register_losses=lambda register: None),
            "hooks: it implements none; implement register_losses or register_frameworks with ",
        ),
        (
            hooks(register_losses=hookimpl(lambda catalogue: None)),
            "register_losses: its argument is named 'catalogue'; name it 'register'",
        ),
        (plugin(MINE, ends_with=RuntimeError("no licence")), "its hook fails: RuntimeError: no licence"),
        (plugin(ends_with=SystemExit(3)), "its hook fails: SystemExit: 3"),
        (plugin("mine"), "the check of its row 'mine' fails: AttributeError: 'str' object has no "),
        (plugin(replace(MINE, name="other", dialects=("trl",))), "the check of its row 'other' fails: "),
        (plugin(replace(MINE, name="grpo")), f"policy 'grpo': {SAME} composer-plugins registered; rename"),
    ],
)
def test_a_wrong_plugin_is_named_and_the_others_load(wrong: object, expected: str) -> None:
    (problem,) = problems(wrong, plugin(MINE))
    assert problem.startswith(f"plugin of dist-0 1.0: {expected}")


def test_a_framework_of_a_plugin_is_registered_and_a_wrong_one_is_named() -> None:
    @hookimpl
    def register_frameworks(register: Callable[[Any], None]) -> None:
        for table in (Framework(name="trl", title="TRL"), "acme", Framework(name="acme", title="Acme")):
            register(table)

    manager = get_plugin_manager(entry_points=False)
    for one in (hooks(register_frameworks=register_frameworks), plugin(MINE)):
        add_plugin(manager, one, "dist-0 1.0")
    found = frameworks.collect(manager)
    assert found.known["acme"].title == "Acme" and found.known["trl"] is TRL
    wanted = "pass a composer_plugins.frameworks.contract.Framework"
    assert [str(one) for one in found.problems] == [
        "plugin of dist-0 1.0: framework 'trl': there is one already; rename it",
        f"plugin of dist-0 1.0: register: it got 'acme'; {wanted}",
    ]


def test_the_second_of_two_plugins_with_one_name_is_named() -> None:
    (problem,) = problems(plugin(MINE), plugin(MINE))
    assert problem == f"plugin of dist-1 1.0: policy 'mine': {SAME} dist-0 1.0 registered; rename the loss"


PLUGIN = """
from composer_plugins.losses.row import Dialect, Loss, Parameter
from composer_plugins.hookspecs import hookimpl
from composer_plugins.kernels.types import TokenLoss

def scaled(logprobs, mask, *, scale=1.0): return TokenLoss((scale * logprobs).where(mask, 0), {})
def raises(logprobs, mask, *, scale=1.0): raise ValueError("no\\nGPU")
def required(logprobs, mask, *, scale): return logprobs * scale
def bare(logprobs, mask, *, scale=1.0): return logprobs * mask
def writes(logprobs, mask, *, scale=1.0):
    mask.logical_not_()
    return TokenLoss(logprobs * ~mask, {})

def row(name, kernel):
    return Loss(
        name=name, kind="policy", path=f"acme_losses:{kernel}", summary="a loss of mine", paper="a note",
        proof="test_acme.py::test_it", needs=("logprobs", "mask"), mode="token-mean",
        parameters={"scale": Parameter("how much")},
        dialects=(Dialect(upstream="acme", params={"scale": 2.0}, source="a", proof="test_a.py::test_it"),),
    )

@hookimpl
def register_losses(register):
    for name in ("scaled", "raises", "required", "bare", "writes"):
        register(row(name, name))
    register(row("grpo", "scaled"))
    register(row("absent", "absent"))
"""


def install(folder: Path, **modules: str) -> None:
    """Make a distribution as pip installs it; each of these modules is an entry point."""
    info = folder / "acme_losses-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-losses\nVersion: 2.5\n")
    entries = "".join(f"{name} = {name}\n" for name in modules)
    (info / "entry_points.txt").write_text(f"[composer_plugins]\n{entries}")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


@pytest.fixture
def acme_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that works and one that does not."""
    install(tmp_path, acme_losses=PLUGIN, acme_losses_broken="raise OSError('no GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # twice, and it counts once


FAULTS = [
    "plugin of acme-losses 2.5: acme_losses_broken fails on import: OSError: no GPU",
    "plugin of acme-losses 2.5: policy 'grpo': acme_losses:scaled has the name of "
    "composer_plugins.kernels.policy:grpo, which composer-plugins registered; rename the loss",
    "plugin of acme-losses 2.5: policy 'absent', path: 'acme_losses:absent' does not exist: acme_losses has "
    "no function 'absent'; correct the path: module:function",
]
KERNELS = {  # the fault of each, if it has one
    "scaled": "",
    "raises": "its kernel acme_losses:raises fails on the worked example: ValueError: no GPU",
    # one of check_result (losses/test_calling.py has all), and that of check_not_written
    "bare": "'bare' returned Tensor; return TokenLoss(loss, metrics), with one value per token",
    "writes": "'writes' writes to its input 'mask', which the framework goes on to use; compute on a copy: "
    "mask.clone()",
    "required": "its kernel acme_losses:required fails on the worked example: ValueError: scale has "
    "no default: write scale=1, or Parameter(..., example=1) in a row",
}


@pytest.mark.usefixtures("acme_is_installed")
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_of_a_plugin_is_explained_and_compared_and_its_fault_is_named(name: str) -> None:
    is_sound = not KERNELS[name]
    faults = [
        *FAULTS,
        *([] if is_sound else [f"plugin of acme-losses 2.5: policy '{name}': {KERNELS[name]}"]),
    ]
    done = invoke("explain", name)
    assert done.exit_code == (not is_sound)
    assert "a loss of mine" in done.stdout and ("on the worked example" in done.stdout) == is_sound
    assert done.stderr == "".join(f"error: {fault}\n" for fault in faults)
    compared = invoke("diff", name, "scaled@acme")
    assert compared.exit_code == (not is_sound) and ("-0.4" in compared.stdout) == is_sound
    assert is_sound or faults[-1] in compared.stderr
    if is_sound:
        listed = invoke("list", "-v", "--kind", "policy")
        assert listed.exit_code == 1
        assert listed.stderr == "".join(f"error: {fault}\n" for fault in FAULTS[:2])
        assert "a loss of mine [plugin: acme-losses 2.5]" in listed.stdout and "@acme" in listed.stdout


@pytest.mark.usefixtures("acme_is_installed")
@pytest.mark.parametrize("raised", ["SystemExit", "BaseException"])  # as pytest's Skipped is
def test_a_plugin_that_ends_the_program_is_a_fault_of_the_plugin(tmp_path: Path, raised: str) -> None:
    (tmp_path / "acme_losses_broken.py").write_text(f"raise {raised}(3)")
    for words, status in (("list scaled", 1), ("explain scaled", 0), ("explain nowhere", 1)):
        done = invoke(*words.split())
        assert done.exit_code == status
        assert f"acme_losses_broken fails on import: {raised}: 3" in done.stderr


@pytest.mark.parametrize("words", [["list"], ["explain", "nowhere"], ["diff", "grpo", "nowhere"]])
def test_a_command_that_calls_no_kernel_does_not_import_a_plugins(tmp_path: Path, words: list[str]) -> None:
    """A kernel loads torch, which takes seconds."""
    rows = PLUGIN[PLUGIN.index("def row") :].replace("acme_losses:", "acme_kernels:")
    imports = "from composer_plugins.losses.row import Dialect, Loss, Parameter\n"
    install(tmp_path, acme=f"{imports}from composer_plugins.hookspecs import hookimpl\n{rows}")
    (tmp_path / "acme_kernels.py").write_text("import torch\n")
    script = "import sys; from composer_plugins.cli import app; app(sys.argv[1:], standalone_mode=False)"
    script = f"import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); {script}"
    done = python("-c", script, *words, first=tmp_path)
    assert done.stdout.endswith("False\n"), done


@pytest.mark.usefixtures("acme_is_installed")
def test_an_installed_plugin_is_chosen_by_name_and_its_faults_are_warned_of() -> None:
    registry.registry.cache_clear()
    try:
        with pytest.warns(registry.PluginWarning) as warned:
            choice = choose("policy", "scaled@acme")
    finally:
        registry.registry.cache_clear()
    assert [str(one.message) for one in warned] == FAULTS
    batch = {"logprobs": torch.tensor([3.0, 4.0]), "mask": torch.tensor([True, False])}
    assert call(choice, batch, check=False).loss.tolist() == [6.0, 0.0]


@pytest.mark.usefixtures("acme_is_installed")
def test_a_wrong_result_is_in_the_json_of_list_and_explain() -> None:
    found = json.loads(invoke("list", "--json").stdout)["problems"]
    wrong = [f"policy '{name}': {KERNELS[name]}" for name in ("bare", "writes")]
    assert [one["message"] for one in found][-2:] == wrong
    explained = invoke("explain", "bare", "--json")
    data = json.loads(explained.stdout)
    assert explained.exit_code == 1 and data["losses"][0]["example"] is None
    assert data["problems"][-1]["message"] == wrong[0]


@pytest.fixture
def acme_is_registered(acme_is_installed: None) -> Iterator[None]:
    registry.registry.cache_clear()
    with pytest.warns(registry.PluginWarning):
        registry.registry()
    yield
    registry.registry.cache_clear()


ABSENT = f"'absent' cannot be used. {FAULTS[2]}; correct or update acme-losses 2.5"
BROKEN = f"(not everything is loaded: {FAULTS[0]})"


@pytest.mark.usefixtures("acme_is_registered")
@pytest.mark.parametrize("words", [["explain", "absent"], ["check", "absent"], ["diff", "absent", "grpo"]])
def test_a_command_that_names_a_loss_of_a_broken_row_says_what_is_wrong_with_it(words: list[str]) -> None:
    assert error(*words).endswith(f": {ABSENT}")


@pytest.mark.usefixtures("acme_is_registered")
def test_a_config_that_names_a_loss_of_a_broken_row_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse({"policy": "absent@trl"})
    assert str(refused.value) == f"policy: {ABSENT}"
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse({"policy": "grpoo", "replay_weight": 1.0, "replay_loss": "grpo"})
    first, second = str(refused.value).splitlines()
    assert first == f"policy: unknown policy loss 'grpoo'; did you mean 'grpo'? {BROKEN}"
    assert second.startswith("replay_loss: 'grpo' is a policy loss and an advantage, not a preference loss; ")
    assert second.endswith(BROKEN)
