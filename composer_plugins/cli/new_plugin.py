"""`composer-plugins new-plugin`: a distribution with three losses and their tests, to start from."""

import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from itertools import takewhile
from keyword import iskeyword
from os.path import abspath, lexists
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from composer_plugins.errors import ConfigError, writing
from composer_plugins.losses.registry import OURS

TEMPLATE = Path(__file__).parents[1] / "template"
MODULE, DISTRIBUTION = "my_losses", "my-losses"


def new_plugin(
    name: Annotated[str, typer.Argument(help="The name of the distribution: my-losses.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where to make it; by default a folder of that name, here.")
    ] = None,
) -> None:
    """Make a distribution with a policy loss, a preference loss, an advantage and their tests.

    Installed, its losses have names in TRL, verl and PRIME-RL alike.
    """
    module = _module(name)
    sound = name.isascii() and module.isidentifier() and name[0].isalpha() and name[-1].isalnum()
    if not sound:
        raise ConfigError(
            "name", f"{name!r} is not the name of a distribution", "use letters, digits and hyphens"
        )
    if owner := taken_by(module):
        raise ConfigError("name", f"{module} is {owner}", "choose another name")
    if Path(f"{module}.py").exists():
        problem = f"{module}.py is in this folder, and Python would import it in the place of the package"
        raise ConfigError("name", problem, f"choose another name, or rename {module}.py")
    target = folder or Path(name)
    whole = Path(abspath(target))
    if lexists(whole):
        raise ConfigError("folder", f"{str(target)!r} exists already", "name another one with --folder")
    with writing("folder", target):
        there = next(parent for parent in whole.parents if parent.is_dir())
        with TemporaryDirectory(prefix=".", dir=there) as temporary:  # nothing is left of it if it fails
            _fill(temporary / whole.relative_to(there), name, module)
            (made,) = Path(temporary).iterdir()
            made.rename(there / made.name)
    typer.echo(f"made {target}; next: cd {target} && pip install -e '.[test]' && pytest")


def _fill(folder: Path, name: str, module: str) -> None:
    """Write the template into a folder, with the names of the distribution and of its module."""
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        path = folder / str(source.relative_to(TEMPLATE)).replace(MODULE, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.read_text().replace(MODULE, module).replace(DISTRIBUTION, name))


def taken_by(module: str) -> str:
    """What has this name already, or "": our package, Python, a framework, or a dependency of ours."""
    from composer_plugins.frameworks.registry import frameworks

    if iskeyword(module):
        return "a keyword of Python"
    if module in sys.stdlib_module_names or module in ("test", "tests"):
        return "a package of tests" if module == "tests" else "a module of Python"
    if module == _module(OURS):
        return "the name of this package"
    if module in map(_module, frameworks()):
        return "the name of a framework"
    try:
        required = {_module(_name(one)) for one in requires(OURS) or ()}
    except PackageNotFoundError:  # a checkout that is not installed
        required = set()
    owners = {_module(one) for one in packages_distributions().get(module, ())}  # yaml is of pyyaml
    return "the name of a dependency of composer-plugins" if required & {module, *owners} else ""


def _module(name: str) -> str:
    return name.replace("-", "_").replace(".", "_").lower()


def _name(requirement: str) -> str:
    return "".join(takewhile(lambda letter: letter.isalnum() or letter in "-_.", requirement))
