"""A replica with transformers' Trainer and torchft, for the tests."""

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from composer_plugins.errors import ComposerError
from parity_tests.recipes.diloco.tiny import (
    LEARNING_RATE,
    ROWS_PER_BATCH,
    SYNC_EVERY,
    Regression,
    batch,
    write_line,
)

MICRO_BATCHES = 2


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


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
    log: str,
    *,
    weights_seed: int = 0,
    dies_at: int | None = None,
    waits: tuple[int, str] | None = None,
    begins: str = "",
    pause: float = 0.0,
    timeout: float = 60.0,
    start_after: float = 0.0,
    raises: bool = False,
) -> None:
    """Train; write a line for every round, and one for an error."""
    from composer_plugins.recipes.diloco.torchft_callback import TorchftDiLoCo

    torch.set_num_threads(1)
    time.sleep(start_after)
    rows = [
        {"x": x, "y": y}
        for number in range(max_steps * MICRO_BATCHES)
        for x, y in zip(*batch(replica, number), strict=True)
    ]

    def on_round(number: int, replicas: int, weights: str) -> None:
        write_line(log, {"replica": replica, "number": number, "replicas": replicas, "weights": weights})
        if raises:
            raise RuntimeError("somebody else's error")

    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            TorchftDiLoCo(
                lighthouse=lighthouse,
                replica=str(replica),
                replicas=replicas,
                sync_every=SYNC_EVERY,
                host="127.0.0.1",
                timeout=timeout,
                on_round=on_round,
            ) as diloco,
        ):
            quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
            plain = {"lr_scheduler_type": "constant", "optim": "adamw_torch", "max_grad_norm": 0.0}
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=max_steps,
                per_device_train_batch_size=ROWS_PER_BATCH,
                gradient_accumulation_steps=MICRO_BATCHES,
                learning_rate=LEARNING_RATE,
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
                **quiet,
                **plain,
            )
            model = Regression(weights_seed)
            callbacks = [AtStep(dies_at, waits, pause, begins), diloco]
            InOrder(model=model, args=arguments, train_dataset=rows, callbacks=callbacks).train()
    except ComposerError as error:
        write_line(log, {"replica": replica, "error": str(error)})
