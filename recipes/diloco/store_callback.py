"""DiLoCo over a folder or a bucket, around TRL's trainer: for jobs that cannot reach each other."""

from typing import Any

from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, Round
from composer_plugins.recipes.diloco.object_store import ObjectStore
from composer_plugins.recipes.diloco.outer import OuterOptimizer, frozen_hash, load_weights, trained_weights
from composer_plugins.recipes.diloco.rounds import Rounds


class ObjectStoreDiLoCo(OuterCallback):
    """Synchronises the replicas through objects in `store`, a folder or a URL of fsspec's.

    store      the same for every replica, and empty before the run: "/mnt/run1", "s3://bucket/run1"
    replica    this one's number, from 0; a process that is started again keeps it
    replicas   how many there are; training starts when all have joined
    quorum     without the others a round is committed after the timeout, if so many have finished it
    timeout    in seconds; longer than the replicas' times for a round differ
    """

    def __init__(
        self,
        *,
        store: str,
        replica: int,
        replicas: int,
        sync_every: int,
        quorum: int = 1,
        timeout: float = 600.0,
        outer: OuterOptimizer | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        super().__init__(sync_every, outer or OuterOptimizer(), on_round)
        self.store = ObjectStore(store, owner=str(replica))
        self.exchange = Rounds(
            self.store,
            replica=replica,
            replicas=replicas,
            quorum=quorum,
            timeout=timeout,
            outer=self.outer,
        )

    def start(self, optimizer: Any) -> None:
        """Join the run. A replica that starts again begins with the last committed round."""
        settings = {"sync_every": self.sync_every, "frozen_weights": frozen_hash(self.model)}
        self.exchange.join(trained_weights(self.model), settings)
        self.restore()

    def synchronise(self) -> None:
        """End a round."""
        commits = self.exchange.synchronise(trained_weights(self.model))
        self.restore()
        for commit in commits:
            participants = tuple(map(str, commit.participants))
            self.report(Round(commit.round + 1, participants, commit.weights))

    def committed(self) -> int:
        """Return the number of rounds that are committed."""
        return self.exchange.round

    def restore(self) -> None:
        """Load the weights of the last committed round."""
        load_weights(self.model, self.exchange.state.weights)
