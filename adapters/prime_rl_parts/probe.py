"""Asked by the doctor, of the interpreter that will train: what PRIME-RL would find when it imports.

Given to that interpreter as a program, so the standard library is all there is. prime_rl is not imported.
"""

import importlib
import json
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORDS = r"stamp_reference|reference_logprobs|stamp_replay_pair|stamp_from_store|loss_weights|[\"']ref_kl[\"']"


def complaint(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def package() -> str:
    """Why composer_plugins cannot be imported; "" if it can."""
    try:
        importlib.import_module("composer_plugins.errors")
    except BaseException as error:
        return complaint(error)
    return ""


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


def words(plugin: str) -> list[str] | None:
    """Which stamps the source of a verifiers plugin speaks of; None if it is not installed."""
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
    return sorted({found.strip("\"'") for found in re.findall(WORDS, text)})


def release() -> list[Any]:
    """The installed PRIME-RL's version, and whether it is of those after 0.8.0 that still say 0.8.0."""
    try:
        number = version("prime-rl")
    except PackageNotFoundError:
        return [None, False]
    spec = find_spec("prime_rl")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = [folder / "configs" / "orchestrator.py" for folder in folders]
    return [number, any("filter_zero_advantages" in file.read_text() for file in files if file.is_file())]


if __name__ == "__main__":
    answer, path, *plugins = sys.argv[1:]
    facts = {
        "prime_rl": release(),
        "package": package(),
        "loss": loss(path) if path else None,
        "plugins": {plugin: words(plugin) for plugin in plugins},
    }
    print(answer + json.dumps(facts), flush=True)
