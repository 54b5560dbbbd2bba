"""The internals of torchft 0.2.0 that this recipe uses, and what it relies on.

- `DiLoCo` hooks the optimizer that it is given. Accelerate's wrapper has no hooks, so it gets the optimizer
  inside. At step `sync_every` the hook calls `manager.start_quorum()` and synchronises a fragment.
- With `init_sync=True`, the default, the first quorum replaces the weights of all replicas but one, after
  they have trained `sync_every` steps. So the manager is made with `init_sync=False`.
- A replica that joins later gets the state of DiLoCo (weights at the last synchronisation, and the outer
  optimizer) when it is in a quorum for the first time; the model itself is not touched. torchft reads it with
  pickle, so whoever reaches the lighthouse and the replicas must be trusted.
- `start_quorum` configures the process group anew when the replicas changed or a round failed.
"""

from typing import Any

from torch import Tensor
from torchft.local_sgd import DiLoCo


def weights_at_last_synchronisation(diloco: DiLoCo) -> dict[str, Tensor]:
    """Return the weights with which the round started, by their names in `TrainedParameters`."""
    weights: dict[str, Tensor] = diloco._fragments[0].original_parameters
    return weights


def synchronise_untrained(diloco: DiLoCo) -> bool:
    """Take part in a synchronisation of the others with a pseudo-gradient of 0, and take their step.

    Return whether the round was committed.
    """
    restore(diloco)
    fragment: Any = diloco._fragments[0]
    fragment.prepare_sync()
    return bool(fragment.perform_sync())


def restore(diloco: DiLoCo) -> None:
    """Load the weights of the last synchronisation into the model."""
    diloco._fragments[0].restore_parameters()


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
