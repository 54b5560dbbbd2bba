"""A program for the interpreter that will train: what PRIME-RL would find there when it imports.

It needs only the standard library. Of prime_rl it imports the class of the config, where there is one.
`examine` writes its second argument.
"""

import copy
import importlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def complaint(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def loss(path: str) -> str | None:
    """Python's complaint about an import path; None if it names a function.

    PRIME-RL takes what stands after the last dot for an attribute, and the rest for a module.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except BaseException as error:
        return complaint(error)
    return None if callable(found) else f"it is not a function, but of type {type(found).__name__}"


def release(distribution: str, package: str, file: str, word: str) -> list[Any]:
    """The version of PRIME-RL by its metadata, and whether it is a later one, whose file lacks the word."""
    try:
        number = version(distribution)
    except PackageNotFoundError:
        number = None
    try:
        spec = find_spec(package)
    except BaseException:
        spec = None
    found = [Path(one, file) for one in (spec.submodule_search_locations or ())] if spec else []
    texts = [one.read_text(errors="replace") for one in found if one.is_file()]
    return [number, bool(texts) and not any(word in text for text in texts)]


def rejected(module: str, name: str, config: dict[str, Any]) -> list[list[str]] | None:
    """What PRIME-RL's own class of the config rejects, as [[key, message]].

    None if the class cannot be imported.
    """
    try:
        validate = getattr(importlib.import_module(module), name).model_validate
    except BaseException:
        return None
    try:
        validate(copy.deepcopy(config))
    except BaseException as error:
        errors: list[dict[str, Any]] = [{"loc": (), "msg": complaint(error)}]
        errors = error.errors() if hasattr(error, "errors") else errors
        return [[written(one["loc"], config), one["msg"]] for one in errors]
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
        "prime_rl": release(*question["installation"]),
        "loss": loss(path) if path is not None else None,
        "rejected": rejected(*question["config"]) if question["config"] else None,
    }
    print(answer + json.dumps(facts), flush=True)
