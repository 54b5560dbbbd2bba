"""DiLoCo over a folder or a bucket, around TRL's trainer: for jobs that cannot reach each other."""

from typing import Any

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import OuterOptimizer, load_weights, trained_weights, weights_hash
from composer_plugins.recipes.diloco.rounds import Rounds


class ObjectStoreDiLoCo(OuterCallback):
    """Synchronises the replicas through objects in `store`, a folder or a URL of fsspec's.

    store      the same for every replica, and of this run alone: "/mnt/run1", "s3://bucket/run1"
    replica    this one's number, from 0; a process that is started again keeps it
    replicas   how many there are; every round waits for all of them
    timeout    in seconds, for the other replicas at the end of a round
    """

    def __init__(
        self,
        *,
        store: str,
        replica: int,
        replicas: int,
        sync_every: int,
        timeout: float = 600.0,
        outer: OuterOptimizer | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        super().__init__(sync_every, outer or OuterOptimizer(), on_round)
        self.store = ObjectStore(store)
        self.options: dict[str, Any] = {"replica": replica, "replicas": replicas, "timeout": timeout}
        self.exchange: Rounds

    def start(self, optimizer: Any) -> None:
        """Begin with the round that this replica has not marked."""
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        self.exchange = Rounds(
            self.store,
            **self.options,
            outer=self.outer,
            weights=trained_weights(self.model),
            settings={"sync_every": self.sync_every, "frozen_weights": weights_hash(frozen)},
        )
        while self.exchange.is_marked():
            if self.done() == self.rounds:
                problem = f"training would end after round {self.rounds}, and {self.store.url} has more"
                raise ConfigError("max_steps", problem, "set at least as many steps as before")
            self.exchange.take_step()
            self.end_round()

    def synchronise(self) -> None:
        """End a round, unless this replica started after the last one."""
        if self.done() >= self.rounds:
            return
        self.exchange.synchronise(trained_weights(self.model))
        self.end_round()

    def end_round(self) -> None:
        """Load the new weights, report the round, and wait for the other replicas if it was the last one."""
        self.restore()
        self.report(self.exchange.replicas)
        if self.done() == self.rounds:
            self.exchange.finish()

    def done(self) -> int:
        """Return how many rounds have ended."""
        return self.exchange.done

    def restore(self) -> None:
        """Load the weights of the last round."""
        load_weights(self.model, self.exchange.weights)
