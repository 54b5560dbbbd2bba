"""verl's composed config, as far as the doctor asks of it what the run will do."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_plugins.adapters.verl_parts.rules import TRAINER
from composer_plugins.adapters.verl_parts.run import ACTOR, LOSS, LOSS_MODE, at, is_ours

CHANNELS = ("hint", "replay")


def positive(value: Any) -> bool:
    """Whether a weight is a number above 0; what is no number is refused elsewhere."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


class Run(NamedTuple):
    """A config, or the parts of it that the probe handed over."""

    tree: Mapping[str, Any]

    def at(self, path: str) -> Any:
        """What stands there; None where nothing does."""
        return at(self.tree, path)

    @property
    def estimator(self) -> str:
        """`algorithm.adv_estimator`."""
        return str(self.at("algorithm.adv_estimator"))

    @property
    def loss(self) -> str:
        """The actor's loss mode."""
        return str(self.at(LOSS_MODE))

    @property
    def is_v1(self) -> bool:
        """Whether verl's newer trainer runs; before 0.9 there is none."""
        return bool(self.at("trainer.use_v1"))

    @property
    def mode(self) -> str:
        """`trainer.v1.trainer_mode`; "" with verl's legacy trainer."""
        return str(self.at("trainer.v1.trainer_mode")) if self.is_v1 else ""

    @property
    def carries(self) -> bool:
        """Whether the trainer is the one that delivers hints and pairs."""
        return self.mode == TRAINER

    @property
    def is_ours(self) -> bool:
        """Whether anything of ours is chosen."""
        return is_ours(self.estimator) or is_ours(self.loss) or self.carries

    @property
    def node(self) -> dict[str, Any]:
        """`algorithm.composer`; {} where there is none, or no table."""
        return _table(self.at("algorithm.composer"))

    @property
    def worker_node(self) -> dict[str, Any]:
        """The node as the actor's workers see it."""
        return _table(self.at(f"{LOSS}.composer"))

    @property
    def engine(self) -> str:
        """What the actor's model runs in: fsdp, megatron ..."""
        return str(self.at(f"{ACTOR}.strategy"))

    def weight(self, channel: str) -> str:
        """`hint_weight = 0.1` where a channel is on, or ""."""
        value = self.node.get(f"{channel}_weight")
        return f"{channel}_weight = {value:g}" if positive(value) else ""


def _table(node: Any) -> dict[str, Any]:
    return {str(key): value for key, value in node.items()} if isinstance(node, Mapping) else {}
