"""What the adapter relies on in NeMo-RL, 7ea279a: the module with the types of losses."""

from importlib import import_module
from typing import Any


def interfaces() -> Any:
    """NeMo-RL's module with the types of losses, which is imported when NeMo-RL asks for one."""
    return import_module("nemo_rl.algorithms.loss.interfaces")
