"""Findings about the interpreter that will train: whether verl and our plugin load in it."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_plugin.upstream import MODULES, PLUGIN
from composer_plugins.findings import Finding
from composer_plugins.objective.registered import is_ours

Facts = Mapping[str, Any]  # what the probe answered
NOUNS = {"estimators": "estimator", "losses": "policy loss"}


def environment(facts: Facts, python: str) -> Iterator[Finding]:
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
        problem = (
            f"verl knows no {' or '.join(missing)} 'composer' after import verl: it did not load the plugin"
        )
        yield Finding("error", MODULES, problem, f"export {MODULES}={PLUGIN}, also in a running Ray cluster")


def _install(python: str, what: str) -> str:
    return f"uv pip install --python {python} '{what}'"
