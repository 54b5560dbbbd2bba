"""The interpreter that will train: verl, our plugin in it, TRL, TransferQueue, and Ray's environment."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_doctor.run import Run
from composer_plugins.adapters.verl_parts.run import ENGINES, is_ours
from composer_plugins.doctor import Finding, Target
from composer_plugins.errors import ConfigError

PLUGIN = "composer_plugins.adapters.verl_plugin"
ENTRY_POINT = "composer"
MODULES, PLUGINS = "VERL_USE_EXTERNAL_MODULES", "VERL_USE_EXTERNAL_PLUGINS"
FIRST, ENTRY_POINTS = (0, 6), (0, 9)  # the releases since which there is what we need

Release = tuple[int, int] | None


def number_of(version: str | None) -> Release:
    """Major and minor; None if there is no version."""
    if version is None:
        return None
    if (found := re.match(r"v?(\d+)\.(\d+)", version)) is None:
        raise ConfigError(f"--version {version!r} is no version; wanted 0.9.1, 0.8 ...")
    return int(found[1]), int(found[2])


def at_least(release: Release, wanted: tuple[int, int]) -> bool:
    """Whether verl is as new; of none that is installed, the newest is assumed."""
    return release is None or release >= wanted


def environment(
    facts: Mapping[str, Any], run: Run | None, target: Target, release: Release
) -> Iterator[Finding]:
    """What is wrong before a config is looked at."""
    python = target.python
    if facts["package"]:
        what = f"composer_plugins cannot be used by {python}, which will train: {facts['package']}"
        yield Finding("error", "composer-plugins", what, _install(python, "composer-plugins"))
    if facts["verl"]["absent"]:
        what = f"{python}, which will train, has no verl"
        remedy = f"{_install(python, 'verl[verl-core]')}; or name the interpreter with --python"
        yield Finding("error", "verl", what, remedy)
        return
    if not at_least(release, FIRST):
        what = f"verl {'.'.join(map(str, release or ()))} refuses an estimator that is not its own"
        yield Finding("error", "verl", what, "upgrade to 0.6 or later; hints and replay need 0.9")
        return
    named = facts["environment"].get(MODULES, "")
    yield from _modules(facts, named)
    if facts["verl"]["error"]:
        what = f"import verl fails in {python}: {facts['verl']['error']}"
        yield Finding("error", "verl", what, f'mend that: {python} -c "import verl"')
        return
    if not facts["package"] and not any(facts["verl"]["modules"].values()):
        yield from _registered(facts, named, target, release)
    yield from _trl(facts, run)
    yield from _transfer_queue(facts, run, release, python)
    yield from _cluster(facts, run, release)


def _install(python: str, what: str) -> str:
    return f"uv pip install --python {python} '{what}'"


def _modules(facts: Mapping[str, Any], named: str) -> Iterator[Finding]:
    """verl splits the variable at its commas, strips nothing, and dies of what does not import."""
    parts = named.split(",") if named else []
    clean = ",".join(part.strip() for part in parts if part.strip())
    if clean != named:
        what = f"{named!r}: verl strips no spaces and skips no empty name, and import verl fails"
        yield Finding("error", MODULES, what, f"export {MODULES}={clean}" if clean else f"unset {MODULES}")
        return
    for name, error in facts["verl"]["modules"].items():
        if error:
            what = f"{name} does not import, and import verl fails with it: {error}"
            yield Finding("error", MODULES, what, f"mend or remove {name}")


def _registered(facts: Mapping[str, Any], named: str, target: Target, release: Release) -> Iterator[Finding]:
    """Whether our names are in verl's registries after `import verl`, and if not, why."""
    python = target.python
    told = target.version and not at_least(release, ENTRY_POINTS) and PLUGIN not in named
    if facts["verl"]["said"]:
        what = f"the plugin failed, which verl does not show: {facts['verl']['said'][0]}"
        yield Finding("error", "verl.plugins", what, f'mend that: {python} -W default -c "import verl"')
    elif told:  # of a release that is not the one installed
        yield _why(facts, release, python, f"verl {target.version} will know no estimator 'composer'")
    elif missing := [kind for kind in ("estimators", "losses") if not any(map(is_ours, facts[kind]))]:
        missed = " or ".join({"estimators": "estimator", "losses": "policy loss"}[kind] for kind in missing)
        yield _why(facts, release, python, f"verl knows no {missed} 'composer' after import verl")


def _why(facts: Mapping[str, Any], release: Release, python: str, what: str) -> Finding:
    export, policy = f"export {MODULES}={PLUGIN}", facts["environment"].get(PLUGINS, "auto").strip().lower()
    if not at_least(release, ENTRY_POINTS):
        return Finding("error", MODULES, f"{what}: before 0.9 it loads no entry points", export)
    if policy == "none":
        return Finding("error", PLUGINS, f"{what}: none loads no plugin", f"unset {PLUGINS}, or {export}")
    allowed = [one.strip() for one in policy.split(",")]
    if policy != "auto" and ENTRY_POINT not in allowed:
        remedy = f"export {PLUGINS}={','.join([*filter(None, allowed), ENTRY_POINT])}"
        return Finding("error", PLUGINS, f"{what}: {policy!r} does not allow it", remedy)
    if ENTRY_POINT not in facts["entry_points"]:
        why = "composer-plugins was installed without its entry point, perhaps by an older version"
        remedy = f"{_install(python, 'composer-plugins')} --reinstall; or {export}"
        return Finding("error", "verl.plugins", f"{what}: {why}", remedy)
    remedy = f'{python} -c "import {PLUGIN}" shows why'
    return Finding("error", "verl.plugins", f"{what}, and the plugin says nothing", remedy)


def _trl(facts: Mapping[str, Any], run: Run | None) -> Iterator[Finding]:
    """The FSDP engine imports a class of TRL's as soon as there is a TRL."""
    trl = facts["trl"]
    if trl and not trl["exports"] and (run is None or run.engine in ENGINES):
        what = f"TRL {trl['version'] or ''} is installed beside verl, and exports no {trl['name']}, "
        what += "which verl's FSDP engine imports as soon as there is a TRL: every actor dies of that"
        yield Finding("error", "trl", what, "uninstall trl: one environment for verl, another for TRL")


def _transfer_queue(
    facts: Mapping[str, Any], run: Run | None, release: Release, python: str
) -> Iterator[Finding]:
    queue = facts["transfer_queue"]
    if not at_least(release, ENTRY_POINTS) or (run is not None and not run.is_v1):
        return
    install = _install(python, "verl[verl-core]")
    if not queue["present"]:
        what = f"{queue['wanted'] or 'TransferQueue'} is not installed, and verl's trainer imports it "
        what += "(trainer.use_v1, its default, is true)"
        yield Finding(
            "error", "transfer_queue", what, f"{install}; or trainer.use_v1=False, without channels"
        )
    elif not queue["fits"]:
        what = f"TransferQueue {queue['version']}; verl wants {queue['wanted']}"
        yield Finding("warning", "transfer_queue", what, install)


def _cluster(facts: Mapping[str, Any], run: Run | None, release: Release) -> Iterator[Finding]:
    """verl forwards a fixed list of variables to a cluster that runs already; ours are not in it."""
    init = "ray_kwargs.ray_init"
    where = (run and run.at(f"{init}.address")) or facts["environment"].get("RAY_ADDRESS")
    if not where or where == "local":
        return
    forwarded = (run and run.at(f"{init}.runtime_env.env_vars")) or {}
    by_entry_point = at_least(release, ENTRY_POINTS) and ENTRY_POINT in facts["entry_points"]
    for name in (MODULES, PLUGINS):
        value = facts["environment"].get(name)
        if value and name not in forwarded:
            ours = name == MODULES and PLUGIN in value and not by_entry_point
            what = f"{value!r} is set here, and not in the Ray cluster at {where}, where verl's workers run"
            remedy = f"+{init}.runtime_env.env_vars.{name}='{value}'"
            if by_entry_point:
                remedy += "; composer-plugins itself needs only to be installed on every node"
            yield Finding("error" if ours else "warning", name, what, remedy)
