"""A replica with transformers' Trainer and torchft, for the tests; and the same training without them."""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_plugins.errors import ComposerError
from composer_plugins.recipes.diloco.outer import Tensors, load_weights, trained_weights
from parity_tests.recipes.diloco.tiny import batch, make_model, write_line

ROWS_PER_BATCH = 8
MICRO_BATCHES = 2
LEARNING_RATE = 0.01


class Regression(nn.Module):
    """The tiny model, with a loss as transformers wants it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.inner = make_model(seed)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x) - y).square().mean()}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class TrainerLearner:
    """What the Trainer does between two synchronisations, without it: two micro-batches for each step."""

    def __init__(self) -> None:
        self.model = Regression()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.next = 0

    def train(self, weights: Tensors, replica: int, sync_every: int) -> Tensors:
        load_weights(self.model, weights)
        for _ in range(sync_every):
            self.optimizer.zero_grad()
            for _ in range(MICRO_BATCHES):
                x, y = batch(replica, 0, self.next)
                (self.model(x, y)["loss"] / MICRO_BATCHES).backward()
                self.next += 1
            self.optimizer.step()
        return trained_weights(self.model)


class AtStep(TrainerCallback):
    """Kills the process at a step, waits at a step until a file exists, and pauses at every step."""

    def __init__(self, dies_at: int | None, waits: tuple[int, str] | None, pause: float, begins: str) -> None:
        self.dies_at, self.waits, self.pause, self.begins = dies_at, waits, pause, begins

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.begins:
            Path(self.begins).touch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.waits and state.global_step == self.waits[0] and not Path(self.waits[1]).exists():
            time.sleep(0.02)
        time.sleep(self.pause)


def run_trainer(
    lighthouse: str,
    replica: int,
    replicas: int,
    max_steps: int,
    sync_every: int,
    log: str,
    *,
    weights_seed: int = 0,
    dies_at: int | None = None,
    waits: tuple[int, str] | None = None,
    begins: str = "",
    pause: float = 0.0,
    timeout: float = 60.0,
    raises: bool = False,
) -> None:
    """Train; write a line for every round, and one for an error."""
    from composer_plugins.recipes.diloco.torchft_callback import TorchftDiLoCo

    torch.set_num_threads(1)
    rows = [
        {"x": x, "y": y}
        for number in range(max_steps * MICRO_BATCHES)
        for x, y in zip(*batch(replica, 0, number), strict=True)
    ]

    def on_round(round_: Any) -> None:
        write_line(log, {"replica": replica, **vars(round_)})
        if raises:
            raise RuntimeError("somebody else's error")

    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            TorchftDiLoCo(
                lighthouse=lighthouse,
                replica=str(replica),
                replicas=replicas,
                sync_every=sync_every,
                host="127.0.0.1",
                timeout=timeout,
                on_round=on_round,
            ) as diloco,
        ):
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=max_steps,
                per_device_train_batch_size=ROWS_PER_BATCH,
                gradient_accumulation_steps=MICRO_BATCHES,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                optim="adamw_torch",
                max_grad_norm=0.0,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            model = Regression(weights_seed)
            callbacks = [AtStep(dies_at, waits, pause, begins), diloco]
            InOrder(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()
    except ComposerError as error:
        write_line(log, {"replica": replica, "error": str(error)})
