"""Pytest as in an environment with `composer-plugins[test]` alone: this hides all other packages."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(name: str, extras: frozenset[str], known: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The distributions that `name[extras]` asks for, with itself."""
    if (name, extras) in known:
        return set()
    known.add((name, extras))
    found = {name}
    try:
        wanted = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:  # of another system
        return found
    for one in wanted:
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found |= needed(canonicalize_name(one.name), frozenset(one.extras), known)
    return found


def hidden() -> set[str]:
    """The modules of all other distributions, but for plugins of pytest, which load themselves."""
    kept = needed("composer-plugins", frozenset({"test"}), set())
    plugins = {one.module.partition(".")[0] for one in entry_points(group="pytest11")}
    installed = packages_distributions()
    others = {name for name, owners in installed.items() if not kept & {*map(canonicalize_name, owners)}}
    return others - plugins


def visible(absent: set[str], find: Callable[..., Any], name: str, *rest: Any) -> Any:
    """What PathFinder finds of a module, unless it is one of the absent."""
    return None if name.partition(".")[0] in absent else find(name, *rest)


if __name__ == "__main__":
    finder: Any = PathFinder
    finder.find_spec = partial(visible, hidden(), PathFinder.find_spec)
    sys.exit(pytest.main(sys.argv[1:]))
