"""The hint channel and the replay channel: whether the trainer delivers them, and what they miss."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_doctor.doctor_environment import Release, at_least
from composer_plugins.adapters.verl_doctor.run import CHANNELS, Run
from composer_plugins.adapters.verl_parts.rules import NODE, TRAINER
from composer_plugins.config import ComposerConfig
from composer_plugins.doctor import Finding


def channels(run: Run, settings: Mapping[str, Any], release: Release) -> Iterator[Finding]:
    """Whether each channel that has a weight can be learned; and options of one that has none."""
    for channel in CHANNELS:
        if weight := run.weight(channel):
            yield from _undelivered(run, f"{NODE}.{channel}_weight", weight, release)
        elif not run.carries:  # the trainer refuses them itself
            yield from _idle(run, channel)
    for key, what, remedy in settings["faults"]:
        yield Finding("error", key, what, remedy)


def _undelivered(run: Run, key: str, weight: str, release: Release) -> Iterator[Finding]:
    """verl's registries hand over rewards and the sampled tokens' log-probabilities, and no more."""
    if not at_least(release, (0, 9)):
        what = f"{weight}, and verl before 0.9 has no trainer that could deliver it"
        yield Finding("error", key, what, "upgrade to 0.9 or later, or set it to 0")
    elif not run.is_v1:
        what = f"{weight}, and verl's legacy trainer (use_v1=False) cannot deliver it"
        remedy = f"trainer.use_v1=True trainer.v1.trainer_mode={TRAINER}, or set it to 0"
        yield Finding("error", key, what, remedy)
    elif not run.carries:
        what = f"{weight}, and the trainer {run.mode!r} does not deliver it"
        yield Finding("error", key, what, f"trainer.v1.trainer_mode={TRAINER}, or set it to 0")


def _idle(run: Run, channel: str) -> Iterator[Finding]:
    weight = f"{channel}_weight"
    options = [key for key in ComposerConfig.model_fields if key.startswith(f"{channel}_") and key != weight]
    if idle := [key for key in run.node if key in options]:
        what = f"it does nothing without {weight}"
        remedy = f"+{NODE}.{weight}=0.1 trainer.v1.trainer_mode={TRAINER}, or remove it"
        yield Finding("warning", f"{NODE}.{idle[0]}", what, remedy)
