"""The program that the doctor runs in the interpreter that will train: verl's import, hydra's config.

Only the standard library is certain to be there. verl takes seconds to import, so it is imported once, with
the environment variables that the run will have. Names of verl come with the request (`upstream.py`).
"""

import json
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CHECKS = "composer_plugins.adapters.verl_plugin.sync_trainer.checks"


def complaint(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def attempt(call: Callable[..., Any], *arguments: Any) -> str:
    """Return why a call fails; "" if it does not."""
    try:
        call(*arguments)
    except BaseException as error:  # an import may end in SystemExit
        return complaint(error)
    return ""


def verl(plugin: str) -> dict[str, Any]:
    """Import verl as every process of a run does, and return why it or our plugin failed."""
    found: dict[str, Any] = {"version": None, "failure": "", "absent": find_spec("verl") is None}
    with suppress(PackageNotFoundError):
        found["version"] = version("verl")
    if found["absent"]:
        return found | {"error": "ModuleNotFoundError: No module named 'verl'"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = attempt(import_module, "verl")
    return found | {
        "error": error,
        "version": found["version"] or getattr(sys.modules.get("verl"), "__version__", None),
        "failure": " ".join(getattr(sys.modules.get(plugin), "FAILURE", "").split()),
    }


def composed(folder: str, name: str, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """Return the config of `main_ppo --config-dir FOLDER --config-name NAME OVERRIDES`, and hydra's error."""
    try:
        spec = find_spec("verl.trainer")
        verls = Path(next(iter(spec.submodule_search_locations or ())), "config") if spec else Path()
        path = import_module("hydra._internal.utils").create_config_search_path(str(verls))
        if folder:
            anchor = import_module("hydra.core.config_search_path").SearchPathQuery(provider="schema")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=anchor)
        import_module("hydra.core.global_hydra").GlobalHydra.instance().clear()
        import_module("hydra._internal.hydra").Hydra.create_main_hydra2("main_ppo", path)
        config = import_module("hydra").compose(name, overrides)
        return import_module("omegaconf").OmegaConf.to_container(config, resolve=True), ""
    except Exception as error:
        return {}, complaint(error)


def examined(request: dict[str, Any]) -> dict[str, Any]:
    """Return all facts that the doctor judges, as values for JSON."""
    facts: dict[str, Any] = {
        "package": attempt(import_module, CHECKS),
        "verl": verl(request["plugin"]),
        "config": None,
        "composition": "",
        **{kind: [] for kind in ("estimators", "losses", "findings")},
    }
    usable = not facts["verl"]["error"]
    if usable and request["compose"]:
        config, facts["composition"] = composed(request["folder"], request["name"], request["overrides"])
        facts["config"] = config or None
        library = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("external_lib")
        for one in [library] if isinstance(library, str) else library or ():
            attempt(import_module, one)  # it may register names; verl raises its error
    if usable and not facts["package"]:
        facts |= import_module(CHECKS).diagnosed(facts["config"])
        facts["verl"]["failure"] = facts["verl"]["failure"] or facts["failure"]
    return facts


if __name__ == "__main__":
    answer, request = sys.argv[1:]
    print("\n" + answer + json.dumps(examined(json.loads(request)), default=str), flush=True)
