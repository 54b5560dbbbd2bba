"""Frozen copies of the policy: the hint's teacher and the replay's reference.

They are made *before* TRL's constructor runs: it patches the model's forward with a closure over the
original, so a later deepcopy would run the live weights (TRL >= 1.15).
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import TrainerCallback
from trl.trainer.utils import create_model_from_path, get_config_model_id

from composer_plugins.errors import ConfigError

STATE_FILE = "composer_ema_teacher.safetensors"


def frozen(model: nn.Module) -> nn.Module:
    """`model` as something to ask and never to train."""
    return model.eval().requires_grad_(False)


def copies_before_patching(model: Any, count: int) -> list[nn.Module]:
    """`count` frozen copies, of a model that came as a module; none of one that came as a path."""
    if not isinstance(model, nn.Module):
        return []
    return [frozen(copy.deepcopy(model)) for _ in range(count)]


def copy_from_path(trainer: Any) -> nn.Module:
    """A frozen copy of a model that came as a path: loaded once more, with the weights TRL holds now."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    options = dict(trainer.args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    options |= {"dtype": policy.dtype, "device_map": None}
    with torch.random.fork_rng():  # loading may initialise, and must not shift the run's random numbers
        loaded = create_model_from_path(get_config_model_id(policy.config), **options)
    loaded.load_state_dict(policy.state_dict())
    return frozen(loaded)


@contextmanager
def without_gradient_or_dropout(model: nn.Module) -> Iterator[None]:
    """Ask `model`, which may be in training, as a teacher is asked."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class EmaTeacher(TrainerCallback):
    """Moves the teacher after every optimizer step: teacher += rate * (policy - teacher).

    Its weights are part of the run: they are saved in every checkpoint and read back on resuming.
    """

    def __init__(self, teacher: nn.Module, rate: float) -> None:
        self.teacher, self.rate = teacher, rate

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        policy = getattr(model, "module", model)  # DDP's wrapper
        for mine, theirs in zip(self.teacher.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine), self.rate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            path = self._path(args, state)
            save_model(self.teacher, str(path.with_suffix(".partial")))
            os.replace(path.with_suffix(".partial"), path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        path = self._path(args, state)
        if not path.exists():
            raise ConfigError(
                f"resuming at step {state.global_step} with hint_teacher='ema', and there is no {path}: "
                "put the checkpoint's file there, or the teacher would start over"
            )
        load_model(self.teacher, str(path))

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE_FILE
