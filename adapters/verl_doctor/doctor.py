"""What `composer-plugins doctor` knows of verl: how a run can be lost to its environment or its YAML.

verl looks up an estimator and a loss by name after the model is loaded and the first rollout is done, and
swallows the error of a plugin; here is what can be told before.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.verl_doctor import probe
from composer_plugins.adapters.verl_doctor.doctor_channels import channels
from composer_plugins.adapters.verl_doctor.doctor_config import names, policy, settings_refused, unread
from composer_plugins.adapters.verl_doctor.doctor_environment import Release, environment, number_of
from composer_plugins.adapters.verl_doctor.run import Run
from composer_plugins.adapters.verl_parts.run import ACTOR
from composer_plugins.doctor import Examination, Finding, Target, ask
from composer_plugins.errors import ConfigError

KNOWN = (0, 10)  # the first release whose contract nobody has read
NOTHING: Mapping[str, Any] = {"refused": (), "faults": (), "anchored": ""}  # without our package there


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Everything that is wrong with the environment of `target`, and with this YAML and these overrides."""
    request = wanted(files, target.overrides)
    facts = ask(target.python, Path(probe.__file__), json.dumps(request))
    release = number_of(target.version or facts["verl"]["version"])
    composed = "".join(
        f", composed with --config-dir {file.resolve().parent} --config-name {file.stem}" for file in files
    )
    return Examination(against(target, facts, release) + composed, tuple(judge(facts, target, release)))


def wanted(files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """What the probe is to compose: the file by its folder and its name, as hydra takes it."""
    if len(files) > 1:
        raise ConfigError(
            f"{', '.join(map(str, files))}: main_ppo takes one config; name the others in its defaults list"
        )
    request = {"compose": bool(files or overrides), "folder": "", "name": "ppo_trainer"}
    for file in files:
        if file.suffix != ".yaml":
            raise ConfigError(f"{file}: hydra reads files that end in .yaml; an override is key=value")
        try:
            file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', error)}") from None
        request |= {"folder": str(file.resolve().parent), "name": file.name}
    return request | {"overrides": list(overrides)}


def judge(facts: Mapping[str, Any], target: Target, release: Release) -> Iterator[Finding]:
    """The findings in what the probe told; nothing is asked or read here."""
    run = Run(facts["config"]) if facts["config"] else None
    yield from environment(facts, run, target, release)
    if facts["composition"]:
        yield composition(facts["composition"])
    if run is None:
        return
    if run.at(ACTOR) is None or run.at("trainer.project_name") is None:
        what = "the config has nothing of verl's own"
        yield Finding("error", "defaults", what, "begin the file with defaults: [ppo_trainer, _self_]")
        return
    settings = facts["settings"] or NOTHING
    yield from names(run, facts)
    yield from settings_refused(run, settings)
    yield from unread(run)
    yield from policy(run, settings)
    yield from channels(run, settings, release)


def composition(message: str) -> Finding:
    """What hydra says, which main_ppo would say as well."""
    kind, _, said = message.partition(": ")
    remedy = "mend the file or the override"
    if added := re.search(r"use (\+.+)", said):
        remedy = f"write '{added[1].strip()}'; of a table that is there, take the old one out first: '~KEY'"
    return Finding("error", "hydra", f"the config cannot be composed: {kind}: {said}", remedy)


def against(target: Target, facts: Mapping[str, Any], release: Release) -> str:
    """Which verl, and how that is known."""
    installed = facts["verl"]["version"]
    if target.version:
        text = f"verl {target.version} (--version)"
    elif installed:
        text = f"verl {installed} ({target.python})"
    else:
        return f"verl 0.6 to 0.9 (none is installed for {target.python}; --python names another)"
    return text + ("; the doctor knows 0.6 to 0.9" if release and release >= KNOWN else "")
