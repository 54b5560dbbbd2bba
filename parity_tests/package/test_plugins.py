"""Plugins: a third party's loss stands beside ours, and a broken plugin takes nobody else down."""

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from composer_plugins import plugins
from composer_plugins.adapter import Adapter
from composer_plugins.catalogue import of_kind
from composer_plugins.hookspecs import hookimpl
from composer_plugins.plugins import add_plugin, collect, get_plugin_manager

GRPO = of_kind(collect(get_plugin_manager(entry_points=False)).losses, "policy")["grpo"]
MINE = replace(GRPO, name="mine", summary="a loss of mine", dialects=())


def plugin(*losses: Any) -> object:
    class Plugin:
        @hookimpl
        def register_losses(self, register: Callable[[Any], None]) -> None:
            for loss in losses:
                register(loss)

    return Plugin()


def problems(*added: object) -> list[str]:
    """What is wrong with these plugins, added one after the other as `dist-0 1.0`, `dist-1 1.0` ..."""
    manager = get_plugin_manager(entry_points=False)
    for i, one in enumerate(added):
        add_plugin(manager, one, f"dist-{i} 1.0")
    found = collect(manager)
    assert GRPO in found.losses  # ours are there whatever happens
    return [str(problem) for problem in found.problems]


def test_the_bundled_rows_come_through_the_hook_without_a_problem() -> None:
    found = collect(get_plugin_manager(entry_points=False))
    assert found.problems == ()
    assert set(found.origins.values()) == {"composer-plugins"}
    assert collect(get_plugin_manager(entry_points=False)) == found  # a factory: two do not share state


def test_another_distributions_loss_stands_beside_ours_under_its_name() -> None:
    manager = get_plugin_manager(entry_points=False)
    add_plugin(manager, plugin(MINE), "dist-0 1.0")
    found = collect(manager)
    assert MINE in found.losses and found.problems == ()
    assert found.origins["policy", "mine"] == "dist-0 1.0"


def test_a_duplicate_is_refused_by_name_and_the_rest_of_its_plugin_loads() -> None:
    (problem,) = problems(plugin(replace(MINE, name="grpo"), MINE))
    assert problem.startswith("plugin of dist-0 1.0: policy 'grpo'")
    assert "registered already by composer-plugins" in problem
    (problem,) = problems(plugin(MINE), plugin(MINE))
    assert problem.startswith("plugin of dist-1 1.0") and "already by dist-0 1.0" in problem


def test_two_kinds_may_share_a_name() -> None:
    assert problems(plugin(replace(MINE, name="jsd"))) == []


def test_a_misspelt_hook_is_named_with_the_nearest() -> None:
    class Misspelt:
        @hookimpl
        def register_loses(self, register: Any) -> None: ...

    (problem,) = problems(Misspelt(), plugin(MINE))
    assert problem == ("plugin of dist-0 1.0: unknown hook 'register_loses': did you mean 'register_losses'?")


def test_a_hook_without_its_marker_is_no_hook() -> None:
    class Unmarked:
        def register_losses(self, register: Any) -> None: ...

    (problem,) = problems(Unmarked())
    assert "implements none of our hooks: register_losses, register_adapters" in problem


def test_a_hook_that_takes_something_else_is_named() -> None:
    class Foreign:
        @hookimpl
        def register_losses(self, catalogue: Any) -> None: ...

    (problem,) = problems(Foreign())
    assert problem == "plugin of dist-0 1.0: the argument of register_losses must be called `register`"


def test_a_hook_that_raises_does_not_take_the_others_down() -> None:
    class Raising:
        @hookimpl
        def register_losses(self, register: Any) -> None:
            register(replace(MINE, name="half"))
            raise RuntimeError("no licence")

    manager = get_plugin_manager(entry_points=False)
    add_plugin(manager, Raising(), "dist-0 1.0")
    add_plugin(manager, plugin(MINE), "dist-1 1.0")
    found = collect(manager)
    assert [str(p) for p in found.problems] == [
        "plugin of dist-0 1.0: its hook fails: RuntimeError: no licence"
    ]
    assert MINE in found.losses
    assert "half" not in {loss.name for loss in found.losses}


def test_a_row_that_breaks_its_own_check_does_not_take_the_others_down() -> None:
    class Torn(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("torn\nin two")

    (problem,) = problems(plugin(replace(MINE, name="torn", parameters=Torn()), MINE))
    assert problem == "plugin of dist-0 1.0: its row 'torn' breaks: RuntimeError: torn in two"


def test_an_adapter_registered_twice_or_not_an_adapter_is_refused() -> None:
    class Adapters:
        @hookimpl
        def register_adapters(self, register: Any) -> None:
            register(Adapter(framework="trl", path="x:y", summary="", provides={}))
            register("skyrl")
            register(Adapter(framework="skyrl", path="x:y", summary="", provides={}))

    first, second = problems(Adapters())
    assert "adapter 'trl'" in first and "adapter 'skyrl'" in second


def test_a_plugin_that_fails_on_import_is_named_and_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        ("broken-loss 0.3", EntryPoint("x", "no_such_module_anywhere", plugins.GROUP)),
        ("fine-loss 1.0", EntryPoint("y", "composer_plugins.errors", plugins.GROUP)),
    ]
    monkeypatch.setattr(plugins, "_installed", lambda: installed)
    plugins.registry.cache_clear()
    try:
        with pytest.warns(plugins.PluginWarning) as warned:
            rows = plugins.losses()
    finally:
        plugins.registry.cache_clear()
    assert GRPO in rows
    broken, hookless = (str(w.message) for w in warned)
    assert broken.startswith("plugin of broken-loss 0.3: no_such_module_anywhere fails on import")
    assert hookless.startswith("plugin of fine-loss 1.0: it implements none of our hooks")


PLUGIN = '''
from composer_plugins.catalogue import Dialect, Loss, Parameter
from composer_plugins.hookspecs import hookimpl
from composer_plugins.kernels.contract import TokenLoss
from composer_plugins.kernels.masking import keep


def upside_down(logprobs, advantages, mask, *, scale=1.0):
    """A loss."""
    return TokenLoss(keep(-scale * advantages * logprobs, mask), {})


def row(name):
    return Loss(
        name=name, kind="policy", path="acme_losses:upside_down", summary="turns it round", paper="a note",
        proof="test_acme.py::test_it", needs=("logprobs", "advantages", "mask"), mode="token-mean",
        parameters={"scale": Parameter(1.0, "how much")},
        dialects=(Dialect(upstream="acme", params={"scale": 2.0}, source="a", proof="test_a.py::test_it"),),
    )


@hookimpl
def register_losses(register):
    register(row("upside_down"))
    register(row("grpo"))
'''

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme-losses"
version = "2.5"
[project.entry-points.composer_plugins]
acme = "acme_losses"
broken = "acme_losses_broken"
[tool.setuptools]
py-modules = ["acme_losses", "acme_losses_broken"]
"""


def test_a_third_partys_wheel_adds_its_loss_and_its_mistakes_name_it(tmp_path: Path) -> None:
    source, env = tmp_path / "acme", tmp_path / "env"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "acme_losses.py").write_text(PLUGIN)
    (source / "acme_losses_broken.py").write_text("raise OSError('no GPU')\n")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("acme_losses-2.5-*.whl")

    # A fresh environment, which sees the packages of this one (torch is too large to install again).
    venv.create(env, with_pip=False)
    python = env / "bin" / "python"
    asked = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    target = Path(asked.stdout.strip())
    (target / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True, capture_output=True)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "composer_plugins", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    listed = run("list", "--kind", "policy")
    assert listed.returncode == 1  # the plugin's mistakes
    assert "upside_down" in listed.stdout and "acme-losses 2.5" in listed.stdout
    assert "@acme" in listed.stdout
    assert "plugin of acme-losses 2.5: policy 'grpo'" in listed.stderr.replace("\n", " ")
    assert "acme_losses_broken fails on import: OSError: no GPU" in listed.stderr.replace("\n", " ")

    explained = run("explain", "upside_down@acme")
    assert explained.returncode == 0 and "acme-losses 2.5" in explained.stdout
    assert "plugin of acme-losses 2.5" in explained.stderr
