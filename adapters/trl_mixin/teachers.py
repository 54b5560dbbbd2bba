"""Teachers and references: frozen copies of the policy, its moving average, or the policy itself."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import sharding
from composer_plugins.errors import ComposerWarning, ConfigError
from composer_plugins.kernels.masking import at_least_float32

STATE_FILE = "composer_ema_teacher.safetensors"
FINGERPRINT_FILE = "composer_initial_weights.sha256"
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a weight


@dataclass
class Teacher:
    """A model that a channel compares the policy with. It gets no gradient."""

    model: Any
    # With PEFT the initial policy is the model without its adapter; the ema teacher has other weights.
    as_teacher: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def in_eval_mode(self) -> Iterator[Any]:
        """The model without gradient and dropout. Afterwards it is back in the mode it was in."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.as_teacher():
                yield self.model
        finally:
            self.model.train(was_training)


def fingerprint(trainer: GRPOTrainer, *, below_adapter: bool) -> str:
    """A hash of the policy's weights; with an adapter, of those below it, which are not trained.

    A frozen weight of the adapter is not below it: LoRA's A may start at random.

    Each weight is summed as integers, on its own device, so nothing is copied and the order is irrelevant.
    It is the main process's: FSDP may load the weights there alone, before it cuts them.
    """
    policy: Any = trainer.accelerator.unwrap_model(trainer.model)
    prefix = getattr(policy.base_model, "prefix", None)  # PEFT's, of the names of an adapter's weights
    sums = []
    for name, parameter in policy.named_parameters():
        of_adapter = parameter.requires_grad or (prefix is not None and prefix in name)
        if not (below_adapter and of_adapter):
            with sharding.gathered(parameter):
                bits = parameter.detach().view(INTEGERS[parameter.element_size()])
                total = 0 if bits.is_meta else int(bits.sum(dtype=torch.int64))
                sums.append((name, tuple(parameter.shape), total))
    found = [hashlib.sha256(repr(sums).encode()).hexdigest()]
    broadcast_object_list(found)
    return found[0]


class InitialWeights(TrainerCallback):
    """Saves a fingerprint of the initial weights in every checkpoint, and compares it on resuming.

    A model that is built from a checkpoint would give the run another base teacher and another reference.
    """

    def __init__(self, trainer: GRPOTrainer, *, below_adapter: bool) -> None:
        self.trainer, self.fingerprint = trainer, fingerprint(trainer, below_adapter=below_adapter)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        add_to_checkpoint(args, state, FINGERPRINT_FILE, lambda path: path.write_text(self.fingerprint))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        path = resumed_checkpoint(self.trainer) / FINGERPRINT_FILE
        if not path.exists():
            warnings.warn(
                f"model: training resumes at step {state.global_step}, and {path} does not exist, so it is "
                "not known whether the base teacher and the reference are the first run's; construct the "
                "trainer with the original model",
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


def add_to_checkpoint(args: Any, state: Any, name: str, write: Callable[[Path], object]) -> None:
    """Let the main process write a file into the checkpoint that is being saved, whole or not at all."""
    if state.is_world_process_zero:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / name
        write(path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)


def resumed_checkpoint(trainer: Any) -> Path:
    """The folder that training resumes from, which need not be one of `output_dir`."""
    return Path(trainer._resumed_from)


class EmaTeacher(TrainerCallback):
    """Moves the teacher after every optimizer step: teacher += rate * (policy - teacher), in float32.

    The teacher is the policy with an average of each of the weights that are trained. With LoRA these are A
    and B of each layer, averaged one by one as in TRL's SDPO, which is not the average of their products.
    The averages are saved in every checkpoint and read back on resuming. Until the training starts the
    teacher is the policy. Where the weights are cut into shards, each process averages its own.
    """

    def __init__(self, trainer: GRPOTrainer, rate: float) -> None:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        self.trainer, self.rate, self.averages = trainer, rate, dict[str, Tensor]()
        self.teacher = Teacher(policy, lambda: sharding.with_weights(trainer, self.averages))

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        own = sharding.parameters_of(self.trainer)
        for name, average in self.averages.items():
            average.lerp_(sharding.shard(own[name]).to(average), self.rate)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        own, weights = sharding.parameters_of(self.trainer), {}
        for name, average in self.averages.items():
            weight = sharding.whole(self.trainer, average, own[name])
            if state.is_world_process_zero:
                weights[name] = weight.cpu()
        add_to_checkpoint(args, state, STATE_FILE, lambda path: save_file(weights, path))

    @torch.no_grad()
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        own = {name: p for name, p in sharding.parameters_of(self.trainer).items() if p.requires_grad}
        if state.global_step == 0:
            if not self.averages:
                wide = {name: at_least_float32(sharding.shard(p)) for name, p in own.items()}
                self.averages |= {name: weight.clone() for name, weight in wide.items()}
            return
        path = resumed_checkpoint(self.trainer) / STATE_FILE
        if not path.exists():
            problem = f"it is 'ema', training resumes at step {state.global_step}, and {path} does not exist"
            remedy = "copy the teacher's file into the checkpoint, or set the first run's hint_teacher"
            raise ConfigError("hint_teacher", problem, remedy)
        saved = load_file(path)
        if saved.keys() != own.keys():
            problem = f"it is 'ema', and {path} has other weights than those that are trained"
            raise ConfigError("hint_teacher", problem, "train the same weights as the first run")
        for name, parameter in own.items():
            self.averages[name] = sharding.cut(self.trainer, saved[name], parameter).clone()
