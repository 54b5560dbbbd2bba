"""The policy channel: one of our policy losses in place of TRL's own."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.channel import Channel


@dataclass
class PolicyChannel(Channel):
    """A policy loss of ours, on the log-probabilities of TRL's own forward pass."""

    name = "policy"
    mode: str  # how it is reduced: a key of upstream.DENOMINATORS
    source: str  # of the mode: "set by loss_type=grpo", "as in the paper"

    def __post_init__(self) -> None:
        self.denominator = f"{upstream.DENOMINATORS[self.mode]} ({self.source})"

    def loss(self, trainer: GRPOTrainer, inputs: dict[str, Any], forward: upstream.PolicyForward) -> Tensor:
        """The policy loss of one micro-batch. It is added to what TRL returns for zero advantages."""
        tensors = upstream.policy_tensors(inputs, forward.logprobs)
        token = self.call(tensors)
        factor = upstream.policy_factor(trainer, inputs, tensors, forward.entropies)
        reduced = upstream.reduce_loss(trainer, token.loss * factor, tensors["mask"], self.mode, inputs)
        logged = upstream.metrics(trainer)
        for name in [name for name in logged if name.startswith(upstream.POLICY_METRICS)]:
            del logged[name]  # ours are logged under composer/policy
        self.log(trainer, reduced * upstream.accumulation_steps(trainer), token.metrics)
        return reduced
