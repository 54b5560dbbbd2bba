"""Teachers and references: frozen copies of the policy, its moving average, or the policy itself."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import TrainerCallback

from composer_plugins.diagnosis import ComposerWarning
from composer_plugins.errors import ConfigError
from composer_plugins.kernels.masking import at_least_float32

STATE_FILE = "composer_ema_teacher.safetensors"
FINGERPRINT_FILE = "composer_initial_weights.sha256"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a weight


@dataclass
class WithWeights:
    """A model that is called with other weights."""

    module: nn.Module
    weights: dict[str, Tensor]  # by name: used in the place of the model's own

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self.module, self.weights, kwargs=inputs)


@dataclass
class Teacher:
    """A model that a channel compares the policy with. It gets no gradient."""

    model: Any
    without_adapter: bool = False  # with PEFT the initial policy is the model with its adapter switched off
    weights: dict[str, Tensor] = field(default_factory=dict)  # by name: used in the place of the model's own

    @contextmanager
    def in_eval_mode(self) -> Iterator[Callable[..., Any]]:
        """The model without gradient and dropout. Afterwards it is back in the mode it was in."""
        was_training, own = self.model.training, dict(self.model.named_parameters())
        weights = {name: weight.to(own[name]) for name, weight in self.weights.items()}
        self.model.eval()
        try:
            with torch.no_grad(), self.model.disable_adapter() if self.without_adapter else nullcontext():
                yield WithWeights(self.model, weights) if weights else self.model
        finally:
            self.model.train(was_training)


def fingerprint(model: nn.Module) -> str:
    """A hash of the frozen weights: of a copy all, and with PEFT those below the adapter.

    Each weight is summed as integers, on its own device, so nothing is copied and the order is irrelevant.
    """
    sums = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            bits = parameter.detach().view(INTEGERS[parameter.element_size()])
            sums.append((name, tuple(parameter.shape), int(bits.sum(dtype=torch.int64))))
    return hashlib.sha256(repr(sums).encode()).hexdigest()


class InitialWeights(TrainerCallback):
    """Saves a fingerprint of the initial weights in every checkpoint, and compares it on resuming.

    A model that is built from a checkpoint would give the run another base teacher and another reference.
    """

    def __init__(self, initial: nn.Module) -> None:
        self.fingerprint = fingerprint(initial)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            path = checkpoint(args, state) / FINGERPRINT_FILE
            path.with_suffix(".partial").write_text(self.fingerprint)
            os.replace(path.with_suffix(".partial"), path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        path = checkpoint(args, state) / FINGERPRINT_FILE
        if not path.exists():
            warnings.warn(
                f"model: training resumes at step {state.global_step}, and {path} does not exist, so it is "
                "not known whether the base teacher and the reference are those of the first run; construct "
                "the trainer with the original model",
                ComposerWarning,
                stacklevel=2,
            )
        elif path.read_text() != self.fingerprint:
            problem = "its weights are not those with which the first run began, so the base teacher and the "
            problem += "reference would be another model"
            remedy = (
                "construct the trainer with the original model in the same dtype, and give the checkpoint "
            )
            raise ConfigError("model", problem, remedy + "to train(resume_from_checkpoint=...)")


def checkpoint(args: Any, state: Any) -> Path:
    """The folder of the checkpoint that is being saved or resumed."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class EmaTeacher(TrainerCallback):
    """Moves the teacher after every optimizer step: teacher += rate * (policy - teacher), in float32.

    The teacher is the policy with an average of each of the weights that are trained. With LoRA these are A
    and B of each layer, averaged one by one as in TRL's SDPO, which is not the average of their products.
    The averages are saved in every checkpoint and read back on resuming.
    """

    def __init__(self, policy: nn.Module, rate: float) -> None:
        trained = {name: p.detach() for name, p in policy.named_parameters() if p.requires_grad}
        weights = {name: at_least_float32(p).clone() for name, p in trained.items()}
        self.teacher, self.rate = Teacher(policy, weights=weights), rate

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        own = dict(self.teacher.model.named_parameters())
        for name, weight in self.teacher.weights.items():
            weight = weight.to(own[name].device)  # DeepSpeed moves the policy when training starts
            self.teacher.weights[name] = weight.lerp_(own[name].to(weight), self.rate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            path = self._path(args, state)
            save_file(self.teacher.weights, path.with_suffix(".partial"))
            os.replace(path.with_suffix(".partial"), path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        path = self._path(args, state)
        if not path.exists():
            problem = f"it is 'ema', training resumes at step {state.global_step}, and {path} does not exist"
            raise ConfigError("hint_teacher", problem, "copy the teacher's file into the checkpoint")
        saved = load_file(path)
        if saved.keys() != self.teacher.weights.keys():
            problem = f"it is 'ema', and {path} has other weights than those that are trained"
            raise ConfigError("hint_teacher", problem, "train the same weights as the first run")
        for name, weight in self.teacher.weights.items():
            weight.copy_(saved[name])

    @staticmethod
    def _path(args: Any, state: Any) -> Path:
        return checkpoint(args, state) / STATE_FILE
