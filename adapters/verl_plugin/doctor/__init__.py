"""`composer-plugins doctor --verl`: find errors of the environment and the config before a run.

verl looks up an estimator and a loss by name only after it has loaded the model and made the first rollout,
and it hides the error of a plugin. The doctor asks the interpreter that will train before that.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.doctor import probe
from composer_plugins.adapters.verl_plugin.doctor.environment import environment
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run
from composer_plugins.diagnosis import Examination, Target, ask
from composer_plugins.errors import ConfigError, did_you_mean
from composer_plugins.findings import Finding
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.objective.files import one_config
from composer_plugins.objective.resolve import check_schema, resolve


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Return everything that is wrong with the environment of `target`, this YAML and these overrides."""
    request = request_of(files, target)
    facts = ask(target.python, Path(probe.__file__), json.dumps(request))
    release = upstream.release_of(target.version or facts["verl"]["version"])
    composed = ""
    for file in files:
        composed = f", composed with --config-dir {file.resolve().parent} --config-name {file.stem}"
        composed = ", read by itself" if facts["verl"]["absent"] else composed
    found = list(judge(facts, target, release))
    if facts["verl"]["absent"] and request["compose"]:
        found += without_verl(files, target.overrides)
    return Examination(compared_with(target, facts, release) + composed, tuple(found))


def without_verl(files: Sequence[Path], overrides: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with a file and overrides by themselves, without verl's default values."""
    table = one_config(files, overrides)
    read = resolve("verl", table, option="--framework")
    yield from read.findings
    for key in read.unread:
        remedy = "correct or remove it; with verl installed, the doctor composes the config and knows more"
        yield Finding("warning", key, "it is not understood, and it may bear on the loss", remedy)


def request_of(files: Sequence[Path], target: Target) -> dict[str, Any]:
    """Return the probe's request: the file by its folder and name, as hydra takes it, and the overrides."""
    if len(files) > 1:
        problem = f"{', '.join(map(str, files))} are several files, and main_ppo takes one"
        raise ConfigError("FILE", problem, "name the others in its defaults list")
    request = {
        "compose": bool(files or target.overrides or target.config),
        "folder": "",
        "name": target.config or "ppo_trainer",
    }
    for file in files:
        if file.suffix != ".yaml":
            problem = "hydra reads files that end in .yaml"
            raise ConfigError(str(file), problem, "rename it, or write an override as key=value")
        try:
            file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problem = f"it cannot be read: {getattr(error, 'strerror', error)}"
            raise ConfigError(str(file), problem, "name a readable file") from None
        request |= {"folder": str(file.resolve().parent), "name": file.name}
    return request | {
        "overrides": list(target.overrides),
        "version": target.version,
        "variables": [upstream.MODULES, upstream.PLUGINS, "RAY_ADDRESS"],
        "plugin": upstream.PLUGIN,
        "imports_trl": upstream.IMPORTS_TRL,
    }


def judge(facts: Mapping[str, Any], target: Target, release: upstream.Release) -> Iterator[Finding]:
    """Yield the findings in what the probe answered."""
    run = Run(facts["config"] or {}, release)
    yield from environment(facts, run, target)
    for message, meant in facts["composition"]:
        yield composition(message, meant)
    if not run.tree:
        return
    if run.at(Key.ACTOR) is None or run.at(Key.PROJECT) is None:
        check_schema(VERL, run.tree, "--framework")
        problem = "the config has nothing of verl's own"
        yield Finding("error", "defaults", problem, "begin the file with defaults: [ppo_trainer, _self_]")
        return
    if facts["library"]:
        problem = f"{run.at(Key.EXTERNAL_LIB)!r} does not import: {facts['library']}"
        yield Finding("error", Key.EXTERNAL_LIB, problem, "correct it, or remove it")
    for finding in facts["findings"]:  # of options.py, in the interpreter that will train
        yield Finding(*finding)


def composition(message: str, meant: str = "") -> Finding:
    """Return hydra's error, which main_ppo would raise too, as a finding. `meant` is the right override."""
    kind, _, text = message.partition(": ")
    remedy = did_you_mean([meant]) if meant else "correct the file or the override"
    added = re.search(r"use (\+.+)", text)
    if added and meant in ("", added[1].strip()):
        remedy = f"write '{added[1].strip()}'; to replace a whole table, remove the old one first: '~KEY'"
    return Finding("error", "hydra", f"the config cannot be composed: {kind}: {text}", remedy)


def compared_with(target: Target, facts: Mapping[str, Any], release: upstream.Release) -> str:
    """Return the version of verl that the config is compared with, and where it was found."""
    installed = facts["verl"]["version"]
    if target.version:
        text = f"verl {target.version} (--version)"
    elif installed:
        text = f"verl {installed} ({target.python})"
    else:
        return f"verl 0.8 to 0.9 (none is installed for {target.python}; --python names another)"
    return text + ("; the doctor knows 0.8 to 0.9" if release and release >= upstream.UNTESTED else "")
