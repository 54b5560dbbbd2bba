"""`composer-plugins new-plugin`: a distribution with three losses and their tests, to start from."""

import shutil
from importlib.util import find_spec
from keyword import iskeyword
from os.path import lexists
from pathlib import Path
from typing import Annotated

import typer

from composer_plugins.errors import ConfigError, writing

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
    from composer_plugins.frameworks.registry import frameworks

    module = name.replace("-", "_").replace(".", "_").lower()
    sound = name.isascii() and module.isidentifier() and name[0].isalpha() and name[-1].isalnum()
    if not sound or iskeyword(module):
        problem = f"{name!r} is not the name of a distribution and of a module of Python"
        raise ConfigError("name", problem, "use letters, digits and hyphens")
    if name.lower() in frameworks() or find_spec(module):
        raise ConfigError("name", f"a module {module} exists already", "choose another name")
    target = folder or Path(name)
    if lexists(target):
        raise ConfigError("folder", f"{str(target)!r} exists already", "name another one with --folder")
    with writing("folder", target):
        shutil.copytree(TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__"))
        for path in sorted(target.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path.is_file():
                path.write_text(path.read_text().replace(MODULE, module).replace(DISTRIBUTION, name))
            path.rename(path.with_name(path.name.replace(MODULE, module)))
    typer.echo(f"made {target}; next: cd {target} && pip install -e '.[test]' && pytest")
