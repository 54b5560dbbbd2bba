"""Findings about the interpreter that will train: verl, our plugin in it, TRL, TransferQueue, Ray."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run
from composer_plugins.adapters.verl_plugin.upstream import ENTRY_POINT, MODULES, PLUGIN, PLUGINS
from composer_plugins.diagnosis import Target
from composer_plugins.findings import Finding
from composer_plugins.frameworks.verl import SHOWS_LOGITS, Key
from composer_plugins.objective.registered import is_ours

Facts = Mapping[str, Any]  # what the probe answered
NOUNS = {"estimators": "estimator", "losses": "policy loss"}


def environment(facts: Facts, run: Run, target: Target) -> Iterator[Finding]:
    """Yield what is wrong apart from the options; `run.tree` is empty where no config is examined."""
    python = target.python
    if facts["package"]:
        problem = f"{python}, which will train, cannot import composer-plugins: {facts['package']}"
        yield Finding("error", "composer-plugins", problem, _install(python, "composer-plugins"))
    if facts["verl"]["absent"]:
        problem = f"{python}, which will train, has no verl"
        remedy = f"{_install(python, 'verl[verl-core]')}, or name the interpreter with --python"
        yield Finding("error", "verl", problem, remedy)
        return
    yield from _modules(facts)
    if facts["verl"]["error"]:
        problem = f"import verl fails in {python}: {facts['verl']['error']}"
        yield Finding("error", "verl", problem, f'correct that: {python} -c "import verl" shows it')
        return
    if not facts["package"] and not any(facts["verl"]["modules"].values()):
        yield from _registered(facts, run, target)
    yield from _trl(facts, run)
    yield from _transfer_queue(facts, run, python)
    yield from _cluster(facts, run)


def _install(python: str, what: str) -> str:
    return f"uv pip install --python {python} '{what}'"


def _loads_entry_points(run: Run) -> bool:
    return upstream.at_least(run.release, upstream.ENTRY_POINTS)


def _modules(facts: Facts) -> Iterator[Finding]:
    """verl splits the variable at its commas, strips no spaces, and fails where a module does."""
    named = facts["environment"].get(MODULES, "")
    clean = ",".join(part.strip() for part in named.split(",") if part.strip())
    if clean != named:
        problem = f"it is {named!r}, and verl strips no spaces and skips no empty name, so import verl fails"
        yield Finding("error", MODULES, problem, f"export {MODULES}={clean}" if clean else f"unset {MODULES}")
        return
    for name, error in facts["verl"]["modules"].items():
        if error:
            problem = f"{name} does not import, and import verl fails with it: {error}"
            yield Finding("error", MODULES, problem, f"correct or remove {name}")


def _registered(facts: Facts, run: Run, target: Target) -> Iterator[Finding]:
    """Yield why our names are not in verl's registries after `import verl`."""
    python, named = target.python, facts["environment"].get(MODULES, "")
    missing = [noun for kind, noun in NOUNS.items() if not any(map(is_ours, facts[kind]))]
    if facts["verl"]["failure"]:
        problem = f"the plugin failed, and verl does not show the error: {facts['verl']['failure']}"
        remedy = f'correct that: {python} -W default -c "import verl" shows it'
        yield Finding("error", "verl.plugins", problem, remedy)
    elif target.version and not _loads_entry_points(run) and PLUGIN not in named:
        # This release is not the one that is installed, so its registries are not known.
        yield _why(facts, run, python, f"verl {target.version} will know no estimator 'composer'")
    elif missing:
        problem = f"verl knows no {' or '.join(missing)} 'composer' after import verl"
        yield _why(facts, run, python, problem)


def _why(facts: Facts, run: Run, python: str, problem: str) -> Finding:
    export, policy = f"export {MODULES}={PLUGIN}", facts["environment"].get(PLUGINS, "auto").strip().lower()
    if not _loads_entry_points(run):
        return Finding("error", MODULES, f"{problem}, because verl before 0.9 loads no entry points", export)
    if policy == "none":
        problem += ", because with the value none verl loads no plugin"
        return Finding("error", PLUGINS, problem, f"unset {PLUGINS}, or {export}")
    allowed = [one.strip() for one in policy.split(",")]
    if policy != "auto" and ENTRY_POINT not in allowed:
        remedy = f"export {PLUGINS}={','.join([*filter(None, allowed), ENTRY_POINT])}"
        return Finding("error", PLUGINS, f"{problem}, because {policy!r} does not allow it", remedy)
    if ENTRY_POINT not in facts["entry_points"]:
        problem += ", because composer-plugins was installed without its entry point"
        remedy = f"{_install(python, 'composer-plugins')} --reinstall, or {export}"
        return Finding("error", "verl.plugins", problem, remedy)
    remedy = f'{python} -c "import {PLUGIN}" shows why'
    return Finding("error", "verl.plugins", f"{problem}, although the plugin reported no error", remedy)


def _trl(facts: Facts, run: Run) -> Iterator[Finding]:
    """verl's FSDP engine imports a class of TRL's wherever TRL is installed."""
    trl = facts["trl"]
    uses_fsdp = not run.tree or run.at(f"{Key.ACTOR}.strategy") in SHOWS_LOGITS
    if trl and not trl["exports"] and uses_fsdp:
        problem = f"TRL {trl['version'] or ''} is installed beside verl and has no {trl['name']}. verl's "
        problem += "FSDP engine imports it wherever TRL is installed, so every actor ends with an ImportError"
        yield Finding("error", "trl", problem, "uninstall trl here, and give it an environment of its own")


def _transfer_queue(facts: Facts, run: Run, python: str) -> Iterator[Finding]:
    queue, install = facts["transfer_queue"], _install(python, "verl[verl-core]")
    if not _loads_entry_points(run) or (run.tree and not run.is_v1):
        return
    if not queue["present"]:
        problem = f"{queue['wanted'] or 'TransferQueue'} is not installed, and verl's trainer imports it "
        problem += f"({Key.USE_V1} is True by default)"
        remedy = f"{install}, or set {Key.USE_V1}=False, which has no hint or replay"
        yield Finding("error", "transfer_queue", problem, remedy)
    elif not queue["fits"]:
        problem = f"TransferQueue is {queue['version']}, and verl needs {queue['wanted']}"
        yield Finding("warning", "transfer_queue", problem, install)


def _cluster(facts: Facts, run: Run) -> Iterator[Finding]:
    """verl forwards a fixed list of variables to a Ray cluster that runs already; these are not in it."""
    where = run.at(f"{Key.RAY_INIT}.address") or facts["environment"].get("RAY_ADDRESS")
    if not where or where == "local":
        return
    forwarded = run.at(f"{Key.RAY_INIT}.runtime_env.env_vars") or {}
    by_entry_point = _loads_entry_points(run) and ENTRY_POINT in facts["entry_points"]
    for name in (MODULES, PLUGINS):
        value = facts["environment"].get(name)
        if value and name not in forwarded:
            ours = name == MODULES and PLUGIN in value and not by_entry_point
            problem = f"{value!r} is set here, and not in the Ray cluster at {where}, where verl will run"
            remedy = f"+{Key.RAY_INIT}.runtime_env.env_vars.{name}='{value}'"
            if by_entry_point:
                remedy += "; composer-plugins itself only has to be installed on every node"
            yield Finding("error" if ours else "warning", name, problem, remedy)
