"""DiLoCo by torchft, around TRL's trainer: for replicas that reach each other over the network.

The internals of torchft 0.2.0 that this module relies on:

- `DiLoCo` hooks the optimizer that it is given. Accelerate's wrapper has no hooks, so it gets the optimizer
  inside. At step `sync_every` the hook calls `manager.start_quorum()` and synchronises a fragment.
- `start_quorum` loads the weights and the momentum of another replica into `DiLoCo`, and not into the model,
  if this replica is behind or if no round has been synchronised yet. torchft reads them with pickle, so
  whoever reaches the lighthouse and the replicas must be trusted.
"""

import socket
import time
from datetime import timedelta
from typing import Any

from torch import nn
from torch._C._distributed_c10d import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, logger
from composer_plugins.recipes.diloco.outer import OuterOptimizer


class TorchftDiLoCo(OuterCallback):
    """Synchronises the replicas by torchft, whose lighthouse decides who takes part in a round.

    lighthouse   its address: "http://machine:29510"
    replica      the name of this one, different from the others'
    replicas     how many there are; training starts when all have come
    host         the address of this machine for the others
    timeout      in seconds, for every wait; longer than the lighthouse's --join_timeout_ms
    """

    def __init__(
        self,
        *,
        lighthouse: str,
        replica: str,
        replicas: int,
        sync_every: int,
        host: str | None = None,
        timeout: float = 600.0,
        outer: OuterOptimizer | None = None,
        on_round: OnRound | None = None,
    ) -> None:
        super().__init__(sync_every, outer or OuterOptimizer(), on_round)
        self.lighthouse, self.replica, self.replicas = lighthouse, replica, replicas
        self.host, self.timeout = host or socket.gethostname(), timeout
        self.manager: Manager
        self.diloco: DiLoCo

    def start(self, optimizer: Any) -> None:
        """Meet the other replicas, in a round for which nobody has trained.

        torchft makes the weights of all replicas equal in it. A replica that starts again takes part in a
        round of the others in this way, and takes their weights and momentum.
        """
        self.manager = self.connected()
        trained = TrainedParameters(self.model)
        self.diloco = DiLoCo(
            self.manager,
            [trained],
            getattr(optimizer, "optimizer", optimizer),
            self.outer.of(trained.parameters()),
            sync_every=self.sync_every,
        )
        self.open.enter_context(self.diloco)
        ends = time.monotonic() + self.timeout
        while not self.met():
            if time.monotonic() > ends:
                problem = (
                    f"{self.manager.num_participants()} of {self.replicas} came in {self.timeout:g} seconds"
                )
                raise DataError("replicas", problem, "start the others, or set the number of replicas")
            time.sleep(0.1)
        if self.done():
            self.report(self.manager.num_participants())

    def met(self) -> bool:
        """Ask the lighthouse who is there; if these are all replicas, or they train already, join a round.

        The pseudo-gradient of this replica is 0 in it. Return whether the round succeeded.
        """
        self.manager.start_quorum()
        if self.manager.num_participants() < self.replicas and self.manager.current_step() == 0:
            return False
        self.restore()
        fragment: Any = self.diloco._fragments[0]
        fragment.prepare_sync()
        return bool(fragment.perform_sync())

    def connected(self) -> Manager:
        """Start torchft's manager of this replica."""
        store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        longest = timedelta(seconds=self.timeout)
        try:
            manager = Manager(
                ProcessGroupGloo(timeout=longest),
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,  # how many a round needs is the lighthouse's to say
                use_async_quorum=False,
                rank=0,
                world_size=1,
                store_addr=self.host,
                store_port=store.port,
                lighthouse_addr=self.lighthouse,
                replica_id=self.replica,
                hostname=self.host,
                timeout=longest,
                quorum_timeout=longest,
                connect_timeout=longest,
            )
        except (RuntimeError, TimeoutError, OSError) as error:
            problem = f"{self.lighthouse} does not answer ({in_a_line(error)})"
            raise ConfigError("lighthouse", problem, "start it first, or correct its address") from error
        self.open.callback(manager.shutdown, wait=False)
        self.open.callback(lambda: store)  # the store lives as long as the manager
        return manager

    def synchronise(self) -> None:
        """Report the round. DiLoCo's hook of the optimizer has synchronised already."""
        if self.manager.errored() is None:
            self.report(self.manager.num_participants())
        else:
            logger.error(
                "the synchronisation after round %d failed: the weights are again those of that round",
                self.done(),
            )

    def done(self) -> int:
        """Return how many rounds have ended, without the one in which the replicas met."""
        return int(self.manager.current_step()) - 1

    def restore(self) -> None:
        """Load the weights of the last round."""
        self.diloco._restore_parameters()


class TrainedParameters(nn.Module):
    """The parameters of a model that are trained: what replicas exchange."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name.replace(".", "/"), parameter)
