"""Findings about the interpreter that will train: whether verl loads our plugin in all of its processes."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run
from composer_plugins.adapters.verl_plugin.upstream import ENTRY_POINT, MODULES, PLUGIN, PLUGINS, Release
from composer_plugins.findings import Finding
from composer_plugins.frameworks.verl import Key
from composer_plugins.objective.registered import is_ours

Facts = Mapping[str, Any]  # what the probe answered
NOUNS = {"estimators": "estimator", "losses": "policy loss"}


def environment(facts: Facts, run: Run, python: str, release: Release) -> Iterator[Finding]:
    """Yield what is wrong apart from the options; `run.tree` is empty where no config is examined."""
    if facts["package"]:
        problem = f"{python}, which will train, cannot import composer-plugins: {facts['package']}"
        yield Finding("error", "composer-plugins", problem, _install(python, "composer-plugins"))
    if facts["verl"]["absent"]:
        problem = f"{python}, which will train, has no verl, so verl's own options were not looked at"
        remedy = f"{_install(python, 'verl[verl-core]')}, or name the interpreter with --python"
        yield Finding("error", "verl", problem, remedy)
    elif facts["verl"]["error"]:
        problem = f"import verl fails in {python}: {facts['verl']['error']}"
        yield Finding("error", "verl", problem, f'correct that: {python} -c "import verl" shows it')
    else:
        if not facts["package"]:
            yield from _registered(facts, python, release)
        yield from _cluster(facts, run, release)


def _install(python: str, what: str) -> str:
    return f"uv pip install --python {python} '{what}'"


def _registered(facts: Facts, python: str, release: Release) -> Iterator[Finding]:
    """Yield why our names are not in verl's registries after `import verl`."""
    missing = [noun for kind, noun in NOUNS.items() if not any(map(is_ours, facts[kind]))]
    if facts["verl"]["failure"]:
        problem = f"the plugin failed, and verl does not show the error: {facts['verl']['failure']}"
        remedy = f'correct that: {python} -W default -c "import verl" shows it'
        yield Finding("error", "verl.plugins", problem, remedy)
    elif missing:
        problem = f"verl knows no {' or '.join(missing)} 'composer' after import verl"
        yield _why(facts, python, problem, release)


def _why(facts: Facts, python: str, problem: str, release: Release) -> Finding:
    export, policy = f"export {MODULES}={PLUGIN}", facts["environment"].get(PLUGINS, "auto").strip().lower()
    if not upstream.at_least(release, upstream.ENTRY_POINTS):
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


def _cluster(facts: Facts, run: Run, release: Release) -> Iterator[Finding]:
    """verl forwards a fixed list of variables to a Ray cluster that runs already; ours is not in it."""
    where = run.at(f"{Key.RAY_INIT}.address") or facts["environment"].get("RAY_ADDRESS")
    forwarded = run.at(f"{Key.RAY_INIT}.runtime_env.env_vars") or {}
    value = facts["environment"].get(MODULES, "")
    finds_it = upstream.at_least(release, upstream.ENTRY_POINTS) and ENTRY_POINT in facts["entry_points"]
    if where and where != "local" and PLUGIN in value and MODULES not in forwarded and not finds_it:
        problem = f"{value!r} is set here, and not in the Ray cluster at {where}, where verl will run"
        remedy = f"+{Key.RAY_INIT}.runtime_env.env_vars.{MODULES}='{value}'"
        yield Finding("error", MODULES, problem, remedy)
