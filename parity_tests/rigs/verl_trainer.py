"""composer_sync on a tiny model, its config and its data, as main_ppo has them before it starts workers."""

from pathlib import Path
from typing import Any

import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from pandas import read_parquet
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

from composer_plugins.recipes.verl.on_a_cpu.overrides import overrides

SIMPO = {"replay_weight": 1.0, "replay_loss": "simpo"}
LIVE = {"hint_weight": 1.0, "hint_divergence": "sampled_token", "hint_teacher": "live"}


def composed(*lines: str) -> DictConfig:
    """verl's config with these overrides."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", list(lines))


def on_tiny_files(folder: Path, *lines: str) -> DictConfig:
    """The same for two steps of the files in the folder, with verl's own sampler."""
    return composed(*overrides(folder, 2), *lines, "trainer.v1.sampler.custom_sampler.path=null")


def replace_columns(folder: Path, file: Path, columns: dict[str, Any]) -> None:
    """Write the folder's data with these values in the first rows and None below; None removes a column."""
    data = read_parquet(folder / "train.parquet")
    for name, values in columns.items():
        if values is None:
            data = data.drop(columns=name)
        else:
            data[name] = [values[i] if i < len(values) else None for i in range(len(data))]
    data.to_parquet(file)


def trainer_of(folder: Path, scratch: Path, node: dict[str, Any], *more: str, **columns: Any) -> Any:
    """A trainer with this node and these overrides, on the data with these columns replaced."""
    replace_columns(folder, file := scratch / "train.parquet", columns)
    files = [f"data.{which}_files={file}" for which in ("train", "val")]
    options = [f"+algorithm.composer.{key}={value}" for key, value in node.items()]
    lines = [*files, "trainer.v1.trainer_mode=composer_sync", *more, *options]
    return get_trainer_cls("composer_sync")(on_tiny_files(folder, *lines))


def checked(trainer: Any) -> Any:
    """The trainer after it has read its data, as its `init` has it do before it starts workers."""
    trainer._init_tokenizer()
    trainer._init_dataloader()
    return trainer
