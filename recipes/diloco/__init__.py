"""DiLoCo: replicas train apart and synchronise their weights every H optimizer steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Replica:
    """The options of one replica."""

    replica: int
    replicas: int
    steps: int
    sync_every: int
    seed: int
    timeout: float
    lighthouse: str = ""
    store: str = ""
    host: str = ""
