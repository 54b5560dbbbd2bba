"""A program for the interpreter that will train: what PRIME-RL would find there when it imports.

It needs only the standard library. Of prime_rl it imports the class of the config, where there is one.
`examine` writes its second argument.
"""

import copy
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def complaint(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def package() -> str:
    """Why composer_plugins cannot be imported; "" if it can."""
    try:
        importlib.import_module("composer_plugins.errors")
    except BaseException as error:
        return complaint(error)
    return ""


def only_here(modules: list[str]) -> dict[str, str]:
    """Which of the modules can be imported from the working directory only, each with this directory.

    A program that is given as `-c` has the working directory as "" on its path. PRIME-RL's trainer starts
    somewhere else.
    """

    def present() -> set[str]:
        found = set[str]()
        for one in modules:
            with suppress(ImportError, ValueError):  # of a name that is none
                found |= {one} if find_spec(one) is not None else set()
        return found

    everything, here = list(sys.path), present()
    sys.path[:] = [folder for folder in everything if folder]
    try:
        return dict.fromkeys(sorted(here - present()), str(Path.cwd()))
    finally:
        sys.path[:] = everything


def loss(path: str) -> list[Any] | None:
    """What is wrong with an import path, as [stage, detail]; None if it is a function.

    PRIME-RL takes what stands after the last dot for an attribute, and the rest for a module.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if not (module_name + ".").startswith(missing + "."):
            return ["fails", complaint(error)]
        parent = missing.rpartition(".")[0]
        inside = hasattr(sys.modules.get(parent), missing.rpartition(".")[2])
        return ["inside", missing] if inside else ["module", missing]
    except BaseException as error:
        return ["fails", complaint(error)]
    if not hasattr(module, name):
        return ["attribute", sorted(one for one in vars(module) if not one.startswith("_"))]
    return None if callable(getattr(module, name)) else ["callable", type(getattr(module, name)).__name__]


def words(plugin: str, wanted: list[str]) -> list[str] | None:
    """Which of the wanted words the source of a verifiers plugin has; None if it is not installed."""
    name = plugin.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    try:
        spec = find_spec(name)
    except BaseException:  # of "a.b", a is imported
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in folder.rglob("*.py")] or [Path(spec.origin or "")]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    return sorted({word for word in wanted if word in text})


def release(distribution: str, package: str, features: Sequence[tuple[str, str]]) -> list[Any]:
    """The version of PRIME-RL by its metadata, and for each file of its package whether it has a string.

    None stands for a file that is not there. All of them are None where the package cannot be found.
    """
    try:
        number = version(distribution)
    except PackageNotFoundError:
        number = None
    try:
        spec = find_spec(package)
    except BaseException:
        spec = None
    folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec else []

    def has(name: str, word: str) -> bool | None:
        files = [folder / name for folder in folders if (folder / name).is_file()]
        return any(word in file.read_text(errors="replace") for file in files) if files else None

    return [number, [has(*feature) for feature in features]]


def rejected(module: str, name: str, config: dict[str, Any]) -> list[list[Any]] | None:
    """What PRIME-RL's own class of the config rejects, as [[key, message, whether the key is missing]].

    None if the class cannot be imported.
    """
    try:
        validate = getattr(importlib.import_module(module), name).model_validate
    except BaseException:
        return None
    try:
        validate(copy.deepcopy(config))
    except BaseException as error:
        errors: list[dict[str, Any]] = [{"loc": (), "msg": complaint(error), "type": ""}]
        errors = error.errors() if hasattr(error, "errors") else errors
        return [[written(one["loc"], config), one["msg"], one["type"] == "missing"] for one in errors]
    return []


def written(location: tuple[Any, ...], config: Any) -> str:
    """pydantic's location as a key of the file, without the names that it gives to the members of a union."""
    names = []
    for i, part in enumerate(location):
        is_there = isinstance(config, dict) and part in config
        if isinstance(config, list) and isinstance(part, int):
            config = config[part]
        elif is_there or i == len(location) - 1:
            names.append(str(part))
            config = config[part] if is_there else None
    return ".".join(names)


if __name__ == "__main__":
    answer, question = sys.argv[1], json.loads(sys.argv[2])
    path = question["import_path"]
    facts = {
        "only_here": only_here(question["modules"]),  # before anything is imported
        "prime_rl": release(*question["installation"]),
        "package": package(),
        "loss": loss(path) if path else None,
        "plugins": {plugin: words(plugin, question["words"]) for plugin in question["plugins"]},
        "rejected": rejected(*question["config"]) if question["config"] else None,
    }
    print(answer + json.dumps(facts), flush=True)
