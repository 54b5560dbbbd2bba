"""DiLoCo by torchft, around TRL's trainer: for replicas that reach each other over the network."""

import json
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import AllgatherOptions, TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from composer_plugins.errors import ComposerError, ConfigError, DataError, in_a_line
from composer_plugins.recipes.diloco import upstream
from composer_plugins.recipes.diloco.callback import OnRound, OuterCallback, Round, logger
from composer_plugins.recipes.diloco.outer import OuterOptimizer, frozen_hash, weights_hash

MESSAGE_BYTES = 1024

Settings = dict[str, Any]


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
        self.host, self.timeout = host or socket.gethostname(), timedelta(seconds=timeout)
        self.manager: CheckedManager
        self.diloco: DiLoCo
        self.seen = 0  # the number of committed rounds at the last synchronisation

    def start(self, optimizer: Any) -> None:
        """Meet the other replicas. One that comes later takes the weights of the last round from them."""
        trained = TrainedParameters(self.model)
        frozen = frozen_hash(self.model)
        self.connect(
            lambda: {
                "sync_every": self.sync_every,
                "outer optimizer": [self.outer.lr, self.outer.momentum],
                "weights": self.hash(),
                "frozen weights": frozen,
            }
        )
        outer = torch.optim.SGD(
            trained.parameters(), lr=self.outer.lr, momentum=self.outer.momentum, nesterov=True
        )
        self.diloco = DiLoCo(
            self.manager, [trained], upstream.inner_optimizer(optimizer), outer, sync_every=self.sync_every
        )
        self.open.enter_context(self.diloco)
        if self.manager.meet(self.replicas) and upstream.synchronise_untrained(self.diloco):
            self.report_round()

    def connect(self, settings: Callable[[], Settings]) -> None:
        """Start torchft's manager of this replica."""
        store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        try:
            self.manager = CheckedManager(
                settings,
                CountingGloo(timeout=self.timeout),
                load_state_dict=None,
                state_dict=None,
                min_replica_size=1,  # how many a round needs is the lighthouse's to say
                use_async_quorum=False,
                init_sync=False,
                rank=0,
                world_size=1,
                store_addr=self.host,
                store_port=store.port,
                lighthouse_addr=self.lighthouse,
                replica_id=self.replica,
                hostname=self.host,
                timeout=self.timeout,
                quorum_timeout=self.timeout,
                connect_timeout=self.timeout,
            )
        except (RuntimeError, TimeoutError, OSError) as error:
            problem = f"{self.lighthouse} does not answer ({in_a_line(error)})"
            raise ConfigError("lighthouse", problem, "start it first, or correct its address") from error
        self.open.callback(self.manager.shutdown, wait=False)
        self.open.callback(lambda: store)  # the store lives as long as the manager

    def synchronise(self) -> None:
        """Report the round. DiLoCo's hook of the optimizer has synchronised already."""
        if self.manager.current_step() == self.seen:
            logger.warning(
                "the synchronisation after round %d failed: the weights are again those of that round",
                self.seen,
            )
        else:
            self.report_round()

    def report_round(self) -> None:
        """Report the last committed round."""
        self.seen = self.manager.current_step()
        self.report(Round(self.seen, self.manager.participants, self.hash()))

    def hash(self) -> str:
        """Return the hash of the weights at the last synchronisation, under their names in the model."""
        weights = upstream.weights_at_last_synchronisation(self.diloco)
        return weights_hash({name.replace("/", "."): weight for name, weight in weights.items()})

    def committed(self) -> int:
        """Return the number of rounds that are committed."""
        return self.manager.current_step()

    def restore(self) -> None:
        """Load the weights of the last committed round."""
        upstream.restore(self.diloco)


class TrainedParameters(nn.Module):
    """The parameters of a model that are trained: what replicas exchange."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name.replace(".", "/"), parameter)


class CountingGloo(ProcessGroupGloo):
    """A process group that counts how often it was configured."""

    configured = 0

    def configure(self, *args: Any, **options: Any) -> None:
        """Configure the group for a quorum."""
        super().configure(*args, **options)
        self.configured += 1


class CheckedManager(Manager):
    """torchft's manager; whenever the replicas changed, they compare their settings and weights.

    A replica that meets others in the middle of their training is new. It takes part in their synchronisation
    with nothing, and does not count in the mean.
    """

    def __init__(self, settings: Callable[[], Settings], group: CountingGloo, **options: Any) -> None:
        self.settings, self.group = settings, group
        self.name: str = options["replica_id"]
        self.longest: timedelta = options["quorum_timeout"]
        self.compared = 0  # the configuration of the group in which they compared last
        self.is_training = False
        self.new = 0  # how many replicas are new in this quorum
        self.joins = False  # this one is
        self.names: tuple[str, ...] = ()  # of all in the quorum
        self.participants: tuple[str, ...] = ()  # of those whose training counts
        super().__init__(group, **options)

    def meet(self, replicas: int) -> bool:
        """Wait for the others. Return True if they are training already."""
        began = time.monotonic()
        while True:
            left = self.longest.total_seconds() - (time.monotonic() - began)
            if left <= 0:
                raise too_few(self.longest, f"{len(self.participants)} of {replicas} replicas came")
            self.start_quorum(timeout=timedelta(seconds=left))
            if self.errored():
                continue
            if self.joins or len(self.participants) == replicas:
                self.is_training = True
                return self.joins
            if len(self.participants) > replicas:
                problem = f"it is {replicas}, and {len(self.participants)} came"
                raise ConfigError("replicas", problem, "set the same number on each of them")
            time.sleep(0.1)

    def start_quorum(self, *args: Any, **options: Any) -> None:
        """Ask the lighthouse who takes part."""
        self.new, self.joins, self.participants = 0, False, self.names
        try:
            super().start_quorum(*args, **options)
        except (RuntimeError, TimeoutError) as error:
            raise too_few(self.longest, f"the lighthouse named no group ({in_a_line(error)})") from error
        if self.group.configured != self.compared and not self.errored():
            self.compared = self.group.configured
            try:
                messages = self.exchange({"name": self.name, "trains": self.is_training, **self.settings()})
            except (RuntimeError, TimeoutError) as error:  # another replica was lost
                self.report_error(error)
            else:
                self.compare(messages)

    def num_participants(self) -> int:
        """Return the number of replicas whose pseudo-gradients count."""
        return super().num_participants() - self.new

    def exchange(self, message: Settings) -> list[Settings]:
        """Send this replica's message to all, and return everybody's."""
        mine = torch.frombuffer(
            bytearray(json.dumps(message).encode().ljust(MESSAGE_BYTES)), dtype=torch.uint8
        )
        gathered = [[torch.empty_like(mine) for _ in range(self.group.size())]]
        self.group.allgather(gathered, [mine], AllgatherOptions()).wait()
        return [json.loads(bytes(one.tolist())) for one in gathered[0]]

    def compare(self, messages: list[Settings]) -> None:
        """Note who takes part; raise ConfigError if this replica is not like the first that trains."""
        training = [message for message in messages if message["trains"]]
        self.names = tuple(sorted(message["name"] for message in messages))
        self.participants = tuple(sorted(message["name"] for message in training or messages))
        if training and len(training) < len(messages):
            self.new, self.joins = len(messages) - len(training), not self.is_training
        first = (training or messages)[0]
        for key in first.keys() - {"name", "trains"}:
            for message in messages:
                if message[key] == first[key]:
                    continue
                problem = f"{key} of replica {message['name']} differs from that of replica {first['name']}"
                error = ConfigError(key, problem, "start every replica with the same settings and weights")
                if self.is_training:
                    logger.warning("%s; this synchronisation fails", error)
                    self.report_error(error)
                    return
                raise error


def too_few(longest: timedelta, reason: str) -> ComposerError:
    """The error for a quorum that did not come about."""
    problem = f"{reason} within {longest.total_seconds():g} seconds"
    remedy = "start as many replicas as the lighthouse's --min_replicas and each replica's number ask for"
    return DataError("replicas", problem, remedy)
