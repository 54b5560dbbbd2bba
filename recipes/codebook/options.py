"""The options of a demo: the channels, the seeds, and the settings that all of its runs share.

Importing this module loads no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, unknown

CHANNELS = ("rl", "hint", "replay")
RESULTS_FILE, CURVES_FILE = "results.json", "curves.png"

Channels = tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What all runs of a demo share. Runs differ in their channels and their seed only."""

    steps: int = 250
    teacher: str = "base"
    policy: str = "trl"

    learning_rate: float = 1e-3
    batch_size: int = 64
    num_generations: int = 4
    hint_weight: float = 4.0
    # At this learning rate an ema teacher at the usual 0.05 follows its student into collapse.
    hint_ema_rate: float = 0.002
    replay_weight: float = 0.5
    replay_beta: float = 0.5

    def __post_init__(self) -> None:
        # The trainer's config checks this too, but only after torch is loaded.
        ComposerConfig.parse({"policy": self.policy, "hint_teacher": self.teacher}, framework_loss="trl")


def parse_run(text: str) -> Channels:
    """``"hint+rl"`` as channels, in CHANNELS' order."""
    names = [name.strip().lower() for name in text.split("+")]
    for name in names:
        if name not in CHANNELS:
            raise unknown("--channels", name, CHANNELS, noun="channel")
    return tuple(channel for channel in CHANNELS if channel in names)


def parse_runs(texts: Iterable[str]) -> list[Channels]:
    """``["rl,rl+hint", "replay"]`` as channels; a run named twice is run once."""
    runs = [parse_run(text) for item in texts for text in item.split(",")]
    return list(dict.fromkeys(runs))


def parse_seeds(texts: Iterable[str]) -> list[int]:
    """``["0,1", "7"]`` as seeds; a seed named twice is run once."""
    seeds = [text.strip() for item in texts for text in item.split(",")]
    for text in seeds:
        if not (text.isascii() and text.isdigit() and int(text) < 2**32):
            raise ConfigError("--seeds", f"it has {text!r}", "set whole numbers below 2**32: --seeds 0,1,2")
    return list(dict.fromkeys(map(int, seeds)))


def key_of(channels: Channels) -> str:
    """The way a run is named on the command line and in results.json."""
    return "+".join(channels)


def title_of(channels: Channels) -> str:
    """The way a run is named to a reader."""
    return " + ".join("RL" if channel == "rl" else channel for channel in channels)
