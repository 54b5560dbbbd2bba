"""What both transports do around TRL's trainer."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn
from transformers import TrainerCallback

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.outer import OuterOptimizer, trained_weights, weights_hash

logger = logging.getLogger(__name__)


# Called after a synchronisation with the number of the round, from 1, with how many replicas took part, and
# with the SHA-256 of the weights with which the next round starts.
OnRound = Callable[[int, int, str], None]


class OuterCallback(TrainerCallback, AbstractContextManager):
    """Synchronises the replicas every `sync_every` optimizer steps.

    A step is one of the optimizer's, however many micro-batches its gradient accumulates. The states of the
    inner optimizer and of the learning-rate scheduler stay in each replica. Training stops after the round
    number max_steps / sync_every, also in a replica that started again.

    Use it as a context manager: an exception in the training then ends its connections too.
    """

    def __init__(self, sync_every: int, outer: OuterOptimizer, on_round: OnRound | None) -> None:
        self.sync_every, self.outer, self.on_round = sync_every, outer, on_round
        self.rounds = 0  # how many the run has; known when training begins
        self.steps = 0
        self.model = nn.Module()
        self.open = ExitStack()

    def __exit__(self, *_: object) -> None:
        self.open.close()  # a second call does nothing

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Check the settings, meet the other replicas, and start from the same weights."""
        self.rounds = number_of_rounds(args, state, self.sync_every)
        self.steps, self.model = 0, model
        self.start(optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Synchronise, if this was the last step of a round."""
        self.steps += 1
        if self.steps % self.sync_every == 0:
            self.synchronise()
        if self.done() >= self.rounds:
            self.restore()  # the trainer takes one step also in a replica that started after the last round
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the connections; say whether rounds are missing."""
        self.open.close()
        if missing := self.rounds - self.done():
            logger.error("%d of the %d rounds failed, so their training is lost", missing, self.rounds)

    def start(self, optimizer: Any) -> None:
        """Meet the other replicas; load the weights of the last round, if there is one."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """End a round: exchange the pseudo-gradients, take the outer step, and report it."""
        raise NotImplementedError

    def done(self) -> int:
        """Return how many rounds have ended."""
        raise NotImplementedError

    def restore(self) -> None:
        """Load the weights of the last round."""
        raise NotImplementedError

    def report(self, replicas: int) -> None:
        """Call `on_round` with the round that has ended."""
        if self.on_round:
            self.on_round(self.done(), replicas, weights_hash(trained_weights(self.model)))


def number_of_rounds(args: Any, state: Any, sync_every: int) -> int:
    """Return max_steps / sync_every, or raise ConfigError if the trainer's options do not go with DiLoCo."""
    if args.world_size > 1:
        problem = f"the trainer has {args.world_size} processes, and a replica is one process here"
        raise ConfigError("world_size", problem, "start each replica without torchrun or accelerate launch")
    if state.global_step:
        problem = f"training resumes at step {state.global_step}, and the other replicas have the weights"
        raise ConfigError("resume_from_checkpoint", problem, "start this replica without a checkpoint")
    rounds, left = divmod(state.max_steps, sync_every)
    if left or rounds < 1:
        problem = f"{state.max_steps} is not a multiple of sync_every = {sync_every}"
        raise ConfigError("max_steps", problem, f"set it to {(rounds + 1) * sync_every}")
    return rounds
