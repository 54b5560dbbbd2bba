"""`composer-plugins doctor --verl`: find errors of the environment and the config before a run.

verl looks up an estimator and a loss by name only after it has loaded the model and made the first rollout,
and it hides the error of a plugin. The doctor asks the interpreter that will train before that.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.doctor import probe
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run
from composer_plugins.doctor import Examination, Target, ask
from composer_plugins.errors import ConfigError, Finding
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.objective.files import one_config
from composer_plugins.objective.registered import is_ours
from composer_plugins.objective.resolve import check_schema, resolve

NOUNS = {"estimators": "estimator", "losses": "policy loss"}  # what verl registers, by registry


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Return everything that is wrong with the environment of `target`, this YAML and these overrides."""
    if target.version:
        problem = f"it is {target.version}, and this doctor looks at the verl that is installed"
        raise ConfigError("--version", problem, "name its interpreter with --python")
    request = request_of(files, target)
    facts = ask(target.python, Path(probe.__file__), json.dumps(request))
    release = upstream.release_of(facts["verl"]["version"])
    against, found = compared_with(target, facts, release), list(judge(facts, target.python))
    if facts["verl"]["absent"] and request["compose"]:
        against += ", read by itself" if files else ""
        found += resolve("verl", one_config(files, target.overrides), option="--framework").findings
    elif files:
        against += f", composed with --config-dir {request['folder']} --config-name {files[0].stem}"
    return Examination(against, tuple(found))


def request_of(files: Sequence[Path], target: Target) -> dict[str, Any]:
    """Return the probe's request: the file by its folder and name, as hydra takes it, and the overrides."""
    if len(files) > 1:
        problem = f"{', '.join(map(str, files))} are several files, and main_ppo takes one"
        raise ConfigError("FILE", problem, "name the others in its defaults list")
    return {
        "compose": bool(files or target.overrides or target.config),
        "folder": str(files[0].resolve().parent) if files else "",
        "name": files[0].name if files else target.config or "ppo_trainer",
        "overrides": list(target.overrides),
        "plugin": upstream.PLUGIN,
    }


def judge(facts: Mapping[str, Any], python: str) -> Iterator[Finding]:
    """Yield the findings in what the probe answered."""
    run = Run(facts["config"] or {})
    yield from environment(facts, python)
    if facts["composition"]:  # main_ppo would raise the same
        problem = f"the config cannot be composed: {facts['composition']}"
        yield Finding("error", "hydra", problem, "correct the file or the override")
    if not run.tree:
        return
    if run.at(Key.ACTOR) is None or run.at(Key.PROJECT) is None:
        check_schema(VERL, run.tree, "--framework")
        problem = "the config has nothing of verl's own"
        remedy = "begin the file with defaults: [ppo_trainer, _self_] and hydra: {searchpath: "
        remedy += "[pkg://verl.trainer.config]}, where --config-path finds them"
        yield Finding("error", "defaults", problem, remedy)
        return
    for finding in facts["findings"]:  # of checks.py, and of verl, in the interpreter that will train
        yield Finding(*finding)


def environment(facts: Mapping[str, Any], python: str) -> Iterator[Finding]:
    """Yield what is wrong apart from the options."""
    found = facts["verl"]
    missing = [noun for kind, noun in NOUNS.items() if not any(map(is_ours, facts[kind]))]
    shown = f'correct that: {python} -W default -c "import verl" shows it'
    if facts["package"]:
        problem = f"{python}, which will train, cannot import composer-plugins: {facts['package']}"
        yield Finding("error", "composer-plugins", problem, _install(python, "composer-plugins"))
    if found["absent"]:
        problem = f"{python}, which will train, has no verl, so verl's own options were not looked at"
        remedy = f"{_install(python, 'verl[verl-core]')}, or name the interpreter with --python"
        yield Finding("error", "verl", problem, remedy)
    elif found["error"]:
        yield Finding("error", "verl", f"import verl fails in {python}: {found['error']}", shown)
    elif found["failure"]:
        problem = f"the plugin failed, and verl does not show the error: {found['failure']}"
        yield Finding("error", "verl.plugins", problem, shown)
    elif missing and not facts["package"]:
        problem = f"verl knows no {' or '.join(missing)} 'composer' after import verl: it did not load the "
        remedy = f"export {upstream.MODULES}={upstream.PLUGIN}, also in a running Ray cluster"
        yield Finding("error", upstream.MODULES, f"{problem}plugin", remedy)


def _install(python: str, what: str) -> str:
    return f"uv pip install --python {python} '{what}'"


def compared_with(target: Target, facts: Mapping[str, Any], release: upstream.Release) -> str:
    """Return the version of verl that the config is compared with, and where it was found."""
    if not (installed := facts["verl"]["version"]):
        return f"verl 0.8 to 0.9 (none is installed for {target.python}; --python names another)"
    text = f"verl {installed} ({target.python})"
    return text + ("; the doctor knows 0.8 to 0.9" if release and release >= upstream.UNTESTED else "")
