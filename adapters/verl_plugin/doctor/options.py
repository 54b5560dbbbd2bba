"""What the doctor finds in a whole config of verl: what composer_sync enforces, and what verl refuses."""

from collections.abc import Mapping
from typing import Any

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.doctor.misspelt import misspelt, nearest
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, examined
from composer_plugins.errors import did_you_mean
from composer_plugins.findings import Finding


def diagnosed(
    config: Mapping[str, Any] | None, version: str | None = None, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the doctor's facts: what `examined` returns, what verl refuses, why composer_sync fails to load.

    composer_sync is loaded only where the config names a trainer, or where there is none. `own` is the config
    that verl composes without the user's options (`misspelt.py`).
    """
    run = Run(config or {}, upstream.release_of(version))
    failure = upstream.trainer_failure() if config is None or run.names_trainer else ""
    if config is None:
        return upstream.registries() | {"failure": failure, "findings": []}
    facts = examined(config, version)
    if error := upstream.validation_error(config):
        key, text = error
        known = {one.key for one in facts["findings"] if one.severity == "error"}
        if not any(f"{one}.".startswith(f"{key}.") for one in known):
            problem = f"verl's validate_config raises {text.rstrip('.')}"
            meant = nearest(key, own or {}, run.at(key))
            remedy = did_you_mean([meant]) if meant else "correct it: main_ppo raises the same"
            facts["findings"].append(Finding("error", key, problem, remedy))
    known = {one.key for one in facts["findings"]}
    facts["findings"] += [one for one in misspelt(config, own or {}) if one.key not in known]
    return facts | {"failure": failure}
