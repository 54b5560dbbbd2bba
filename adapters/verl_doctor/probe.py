"""Asked by the doctor, of the interpreter that will train: what `import verl` does, what hydra composes.

Given to that interpreter as a program, so the standard library is all there is for certain. verl takes
seconds to import; it is imported once, with the environment variables that the run will have.
"""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MODULES, PLUGINS, RAY = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS", "RAY_ADDRESS"
SECTIONS = ["algorithm", "trainer", "critic", "data", "distillation", "ray_kwargs"]
PARTS = [*SECTIONS, *(f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))]


def complaint(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def attempt(call: Callable[..., Any], *arguments: Any) -> str:
    """Why a call fails; "" if it does not."""
    try:
        call(*arguments)
    except BaseException as error:  # an import may end in SystemExit
        return complaint(error)
    return ""


def release(name: str) -> str | None:
    """The installed version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def present(name: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def verl() -> dict[str, Any]:
    """`import verl` as every process of a run does it: what stops it, and what our plugin says.

    Where modules of VERL_USE_EXTERNAL_MODULES stop it, it is tried without them, and then each of them.
    """
    found: dict[str, Any] = {"version": release("verl"), "error": "", "modules": {}, "said": []}
    if not present("verl"):
        return found | {"error": "ModuleNotFoundError: No module named 'verl'", "absent": True}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        error = attempt(import_module, "verl")
        if error and os.environ.get(MODULES):
            named = os.environ.pop(MODULES)
            if not (error := attempt(import_module, "verl")):
                found["modules"] = {name: attempt(import_module, name) for name in named.split(",")}
    messages = [" ".join(str(one.message).split()) for one in said]
    return found | {
        "absent": False,
        "error": error,
        "version": found["version"] or getattr(sys.modules.get("verl"), "__version__", None),
        "said": [one for one in messages if one.startswith("composer-plugins is not registered")],
    }


def registries() -> dict[str, list[str]]:
    """The names that verl knows once it and its plugins are loaded; none of a registry that is not there."""
    places = {
        "estimators": ("verl.trainer.ppo.core_algos", "ADV_ESTIMATOR_REGISTRY"),
        "losses": ("verl.trainer.ppo.core_algos", "POLICY_LOSS_REGISTRY"),
        "trainers": ("verl.trainer.ppo.v1.trainer_base", "TRAINER_REGISTRY"),
    }
    found: dict[str, list[str]] = {}
    for kind, (module, name) in places.items():
        try:
            found[kind] = sorted(getattr(import_module(module), name))
        except Exception:  # verl before 0.9 has no v1, and v1 wants TransferQueue
            found[kind] = []
    return found


def trl() -> dict[str, Any] | None:
    """Whether verl's FSDP engine will find in TRL what it imports from there; None: there is no TRL."""
    spec = find_spec("verl.models.transformers.monkey_patch") if present("verl.models.transformers") else None
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
    """Whether TransferQueue is there, in a version that verl's own metadata allows."""
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


def composed(folder: str, name: str, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The config as `main_ppo --config-dir FOLDER --config-name NAME OVERRIDES` has it; what hydra says."""
    try:
        spec = find_spec("verl.trainer")
        own = Path(next(iter(spec.submodule_search_locations or ())), "config") if spec else Path()
        path = import_module("hydra._internal.utils").create_config_search_path(str(own))
        if folder:
            anchor = import_module("hydra.core.config_search_path").SearchPathQuery(provider="schema")
            path.prepend(provider="command-line", path=f"file://{folder}", anchor=anchor)
        import_module("hydra.core.global_hydra").GlobalHydra.instance().clear()
        import_module("hydra._internal.hydra").Hydra.create_main_hydra2("main_ppo", path)
        config = import_module("hydra").compose(name, overrides)
        omega = import_module("omegaconf").OmegaConf
        tree: dict[str, Any] = {}
        for part in PARTS:
            *above, last = part.split(".")
            node, holder = omega.select(config, part), tree
            for name in above:
                holder = holder.setdefault(name, {})
            holder[last] = omega.to_container(node, resolve=True) if omega.is_config(node) else node
        return tree, ""
    except Exception as error:
        return {}, complaint(error)


def columns(files: Any) -> dict[str, list[str]]:
    """The columns of each parquet file that is here."""
    found = {}
    for name in [files] if isinstance(files, str) else files if isinstance(files, list) else ():
        path = Path(str(name)).expanduser()
        if path.suffix == ".parquet" and path.is_file():
            try:
                found[str(name)] = import_module("pyarrow.parquet").read_schema(path).names
            except Exception:  # verl will say what is wrong with it, before it loads a model
                continue
    return found


def examined(request: dict[str, Any]) -> dict[str, Any]:
    """Everything the doctor judges by, as JSON."""
    facts: dict[str, Any] = {
        "package": attempt(import_module, "composer_plugins.errors"),
        "entry_points": {one.name: one.value for one in entry_points(group="verl.plugins")},
        "environment": {name: os.environ[name] for name in (MODULES, PLUGINS, RAY) if name in os.environ},
        "verl": verl(),
    }
    facts |= {"config": None, "composition": "", "library": "", "settings": None, "columns": {}}
    usable = not facts["verl"]["error"]
    if usable and request["compose"]:
        config, facts["composition"] = composed(request["folder"], request["name"], request["overrides"])
        facts["config"] = config or None
        library = ((config.get("actor_rollout_ref") or {}).get("model") or {}).get("external_lib")
        for one in [library] if isinstance(library, str) else library or ():
            facts["library"] = facts["library"] or attempt(import_module, one)
        facts["columns"] = columns((config.get("data") or {}).get("train_files"))
    facts |= {
        **(registries() if usable else {"estimators": [], "losses": [], "trainers": []}),
        "trl": trl() if usable else None,
        "transfer_queue": transfer_queue(),
    }
    if facts["config"] and not facts["package"]:
        reader = "composer_plugins.adapters.verl_doctor.settings"
        facts["package"] = attempt(import_module, reader)  # which an older composer-plugins has not
        if not facts["package"]:
            facts["settings"] = import_module(reader).read(facts["config"], facts["columns"])
    return facts


if __name__ == "__main__":
    answer, request = sys.argv[1:]
    print("\n" + answer + json.dumps(examined(json.loads(request)), default=str), flush=True)
