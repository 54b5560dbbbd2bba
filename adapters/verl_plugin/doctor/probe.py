"""The program that the doctor runs in the interpreter that will train: verl's import, hydra's config.

Only the standard library is certain to be there. verl takes seconds to import, so it is imported once, with
the environment variables that the run will have. Names of verl come with the request (`upstream.py`).
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REQUIREMENTS = "composer_plugins.adapters.verl_plugin.doctor.options"
KEYS = "composer_plugins.adapters.verl_plugin.doctor.misspelt"
OURS = ("+algorithm.composer=null", "+actor_rollout_ref.actor.policy_loss.composer=null")


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


def release(name: str) -> str | None:
    """Return the installed version of a distribution."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return None


def present(name: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def verl(modules: str, plugin: str) -> dict[str, Any]:
    """Import verl as every process of a run does, and return why it or our plugin failed.

    `modules` names the variable that lists modules for verl to import. If the import fails with them, it is
    tried without them, and then each of them alone.
    """
    found: dict[str, Any] = {"version": release("verl"), "error": "", "modules": {}, "failure": ""}
    if not present("verl"):
        return found | {"error": "ModuleNotFoundError: No module named 'verl'", "absent": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = attempt(import_module, "verl")
        if error and os.environ.get(modules):
            named = os.environ.pop(modules)
            if not (error := attempt(import_module, "verl")):
                found["modules"] = {name: attempt(import_module, name) for name in named.split(",")}
    return found | {
        "absent": False,
        "error": error,
        "version": found["version"] or getattr(sys.modules.get("verl"), "__version__", None),
        "failure": " ".join(getattr(sys.modules.get(plugin), "FAILURE", "").split()),
    }


def trl(importer: str) -> dict[str, Any] | None:
    """Return whether TRL has what verl's FSDP engine imports from it; None: there is no TRL."""
    spec = find_spec(importer) if present(importer.rpartition(".")[0]) else None
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    wanted = re.findall(r"from (trl[\w.]*) import (\w+)", source)
    if not wanted or not present("trl"):
        return None
    for module, name in wanted:
        try:
            getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
        except Exception:  # verl catches no more than an ImportError
            break
        return {"version": release("trl"), "exports": True, "name": name}
    return {"version": release("trl"), "exports": False, "name": wanted[-1][1]}


def transfer_queue() -> dict[str, Any]:
    """Return whether TransferQueue is there, in a version that verl's own metadata allows."""
    try:
        lines = requires("verl") or []
    except PackageNotFoundError:
        lines = []
    wanted = next((line.partition(";")[0] for line in lines if line.lower().startswith("transferqueue")), "")
    number = release("TransferQueue")
    fits = True
    if number and wanted and present("packaging"):
        fits = import_module("packaging.requirements").Requirement(wanted).specifier.contains(number, True)
    return {"present": present("transfer_queue"), "version": number, "wanted": wanted.strip(), "fits": fits}


def composed(
    folder: str, name: str, overrides: list[str], keys: Any
) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
    """Return the config of `main_ppo --config-dir FOLDER --config-name NAME OVERRIDES`, verl's own, errors.

    Each error of hydra's is given with the override that was meant, if `keys` finds one. One with another
    key is a guess: the config is composed without it, to find the other errors, and is not judged.
    """
    given, errors, guessed = list(overrides), list[tuple[str, str]](), False
    try:
        spec = find_spec("verl.trainer")
        verls = Path(next(iter(spec.submodule_search_locations or ())), "config") if spec else Path()
        path = import_module("hydra._internal.utils").create_config_search_path(str(verls))
        if folder:
            anchor = import_module("hydra.core.config_search_path").SearchPathQuery(provider="schema")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=anchor)
        import_module("hydra.core.global_hydra").GlobalHydra.instance().clear()
        import_module("hydra._internal.hydra").Hydra.create_main_hydra2("main_ppo", path)
        own = _own(folder, name, overrides) if keys else {}
    except Exception as error:
        return {}, {}, [(complaint(error), "")]
    while True:
        try:
            config = import_module("hydra").compose(name, given)
            plain = import_module("omegaconf").OmegaConf.to_container(config, resolve=True)
            return {} if guessed else plain, own, errors
        except Exception as error:
            message = complaint(error)
            wrong, meant = keys.corrected(message, own) if keys else ("", "")
            errors.append((message, meant))
            if wrong not in given:
                return {}, own, errors
            if meant.lstrip("+") == wrong.lstrip("+"):
                given[given.index(wrong)] = meant
            else:
                given.remove(wrong)
                guessed = True


def _own(folder: str, name: str, overrides: list[str]) -> dict[str, Any]:
    """Return the config of the file's defaults list alone, with the tables `composer` of ours; {} if none."""
    omegaconf, store = import_module("omegaconf").OmegaConf, import_module("hydra.core.config_store")
    groups = [one for one in overrides if "." not in one.partition("=")[0].partition("@")[0]]
    try:
        if folder:
            defaults = omegaconf.load(Path(folder) / name).get("defaults")
            store.ConfigStore.instance().store(name := "composer_own", {"defaults": defaults})
        return dict(omegaconf.to_container(import_module("hydra").compose(name, [*groups, *OURS])))
    except Exception:  # the file's own error is reported where it is composed
        return {}


def examined(request: dict[str, Any]) -> dict[str, Any]:
    """Return all facts that the doctor judges, as values for JSON."""
    variables, package = request["variables"], attempt(import_module, REQUIREMENTS)
    facts: dict[str, Any] = {
        "package": package,
        "entry_points": {one.name: one.value for one in entry_points(group="verl.plugins")},
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
        "verl": verl(variables[0], request["plugin"]),
        "config": None,
        "composition": [],
        "library": "",
    }
    usable, own = not facts["verl"]["error"], dict[str, Any]()
    if usable and request["compose"]:
        keys, lines = None if package else import_module(KEYS), request["overrides"]
        config, own, facts["composition"] = composed(request["folder"], request["name"], lines, keys)
        facts["config"] = config or None
        library = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("external_lib")
        for one in [library] if isinstance(library, str) else library or ():
            facts["library"] = facts["library"] or attempt(import_module, one)
    facts |= {"trl": trl(request["imports_trl"]) if usable else None, "transfer_queue": transfer_queue()}
    facts |= {"estimators": [], "losses": [], "trainers": [], "findings": []}
    if usable and not facts["package"]:
        version = request["version"] or facts["verl"]["version"]
        facts |= import_module(REQUIREMENTS).diagnosed(facts["config"], version, own)
        facts["verl"]["failure"] = facts["verl"]["failure"] or facts["failure"]
    return facts


if __name__ == "__main__":
    answer, request = sys.argv[1:]
    print("\n" + answer + json.dumps(examined(json.loads(request)), default=str), flush=True)
