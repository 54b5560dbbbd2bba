"""What both transports do around TRL's trainer."""

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import TrainerCallback

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.outer import OuterOptimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """What a replica reports after a synchronisation."""

    number: int  # the first is 1
    participants: tuple[str, ...]  # the replicas whose training counted
    weights: str  # the SHA-256 of the weights with which the next round starts


OnRound = Callable[[Round], None]


class OuterCallback(TrainerCallback, AbstractContextManager):
    """Synchronises the replicas every `sync_every` optimizer steps.

    A step is one of the optimizer's, however many micro-batches its gradient accumulates. The states of the
    inner optimizer and of the learning-rate scheduler stay in each replica. Training stops at the round
    number max_steps / sync_every, also in a replica that joined later.

    Use it as a context manager: an exception in the training then ends its connections too. Without one
    they end when training or the process ends.
    """

    def __init__(self, sync_every: int, outer: OuterOptimizer, on_round: OnRound | None) -> None:
        if sync_every < 1:
            raise ConfigError("sync_every", f"it is {sync_every}", "set a number of optimizer steps, from 1")
        self.sync_every, self.outer, self.on_round = sync_every, outer, on_round
        self.rounds = 0  # how many the run has; known when training begins
        self.steps = 0
        self.was_over = False  # before this replica joined
        self.model = nn.Module()
        self.open = ExitStack()
        weakref.finalize(self, self.open.close)

    def __exit__(self, *_: object) -> None:
        self.open.close()  # a second call does nothing

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Check the settings, meet the other replicas, and start from the same weights."""
        self.rounds = number_of_rounds(args, state, self.sync_every)
        self.steps, self.model = 0, model
        self.start(optimizer)
        self.was_over = self.committed() >= self.rounds
        if self.was_over:  # the trainer takes one step all the same; on_step_end reverts it
            logger.warning(
                "the run is over: all %d rounds were committed before this replica joined, so it does not "
                "train and takes the final weights",
                self.rounds,
            )
            control.should_training_stop = True
            self.open.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Synchronise, if this was the last step of a round."""
        self.steps += 1
        if self.was_over:
            self.restore()
        elif self.steps % self.sync_every == 0:
            self.synchronise()
        control.should_training_stop |= self.committed() >= self.rounds

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say whether rounds are missing, and end the connections."""
        if missing := self.rounds - self.committed():
            logger.warning(
                "%d of the %d rounds were not committed, so the training of those steps is lost",
                missing,
                self.rounds,
            )
        self.open.close()

    def start(self, optimizer: Any) -> None:
        """Meet the other replicas; load the weights of the last committed round, if there is one."""
        raise NotImplementedError

    def synchronise(self) -> None:
        """End a round: exchange the pseudo-gradients and take the outer step."""
        raise NotImplementedError

    def committed(self) -> int:
        """Return the number of rounds that are committed."""
        raise NotImplementedError

    def restore(self) -> None:
        """Load the weights of the last committed round."""
        raise NotImplementedError

    def report(self, round_: Round) -> None:
        """Log the round, and call `on_round` with it."""
        who = ", ".join(round_.participants)
        logger.info("round %d: replicas %s, weights %s", round_.number, who, round_.weights[:12])
        if self.on_round:
            self.on_round(round_)


def number_of_rounds(args: Any, state: Any, sync_every: int) -> int:
    """Return max_steps / sync_every, or raise ConfigError if the trainer's options do not go with DiLoCo.

    A last, shorter round would be the alternative to an error. It is none that the paper has: the mean would
    weigh its few steps like a whole round, and every replica would have to agree on the number of them.
    """
    if args.world_size > 1:
        problem = f"the trainer has {args.world_size} processes, and a replica is one process here"
        raise ConfigError("world_size", problem, "start each replica without torchrun or accelerate launch")
    if args.fp16:
        problem = "the gradient scaler skips steps, so the replicas would count their steps differently"
        raise ConfigError("fp16", problem, "train in bf16 or float32")
    if state.global_step:
        problem = f"training resumes at step {state.global_step}, and the other replicas have the weights"
        raise ConfigError("resume_from_checkpoint", problem, "start this replica without a checkpoint")
    rounds, left = divmod(state.max_steps, sync_every)
    if left or not rounds:
        problem = f"{state.max_steps} is not a multiple of sync_every = {sync_every}, so the last steps "
        problem += "would not be synchronised"
        nearest = f"{rounds * sync_every} or {(rounds + 1) * sync_every}" if rounds else f"{sync_every}"
        raise ConfigError("max_steps", problem, f"set it to {nearest}")
    return rounds
