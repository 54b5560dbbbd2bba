"""Stand-ins for the packages that a checkout imports and that have no part in a loss.

A framework's module of losses often imports trackers, servers and GPU kernels. Where such a package is not
installed, an empty module takes its place. Nothing of the checkout is changed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def any_name(owner: Any, name: str) -> Any:
    """As `__getattr__`: a class of this name, unless Python itself looks for it."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Named(name, (Anything,), {})


class Named(type):
    """The type of stand-ins: a class in which every name is another one, in all operations of annotations."""

    __getattr__ = any_name

    def __or__(cls, other: Any) -> Any:
        return Any

    __ror__ = __or__


class Anything(metaclass=Named):
    """A class that takes any arguments, for a base class, an annotation or a decorator."""

    __getattr__ = any_name

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        """As a decorator, the function itself."""
        return arguments[0] if arguments else self

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, schema_of: Any) -> Any:
        """As the type of a field, anything is valid."""
        return schema_of(Any)


class Empty(ModuleType):
    """A module in which every name is a class of its own."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        found = any_name(self, name)
        setattr(self, name, found)
        return found


class Stubs(MetaPathFinder, Loader):
    """Finds empty modules for these packages and everything below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of an empty package."""
        if not any(name == one or name.startswith(f"{one}.") for one in self.names):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed."""


def stub(*names: str) -> list[str]:
    """Let these packages be empty modules, where they are not installed. Returns which are not.

    "tensorboard" is torch.utils.tensorboard too, which looks at its version.
    """
    if "tensorboard" in names and PathFinder.find_spec("tensorboard") is None:
        sys.modules.setdefault("torch.utils.tensorboard", Empty("torch.utils.tensorboard"))
    new = (one for one in names if one not in sys.modules)
    absent = [one for one in new if PathFinder.find_spec(one.split(".")[0]) is None]
    sys.meta_path.append(Stubs(absent))
    return absent


def variable(framework: str) -> str:
    """The environment variable that names a checkout of a framework for the tests and the pages."""
    return f"{framework.replace('-', '_').upper()}_SOURCE"


def source(framework: str) -> Path | None:
    """The checkout that this variable names, if any."""
    named = os.environ.get(variable(framework))
    return Path(named) if named else None


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, in seven digits; "without git" if it has none."""
    if not (checkout / ".git").exists():
        return "without git"
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "without git"
