"""The internals of torchft 0.2.0 that this recipe uses, and what it relies on.

- `DiLoCo` hooks the optimizer that it is given. Accelerate's wrapper has no hooks, so it gets the optimizer
  inside. At step `sync_every` the hook calls `manager.start_quorum()` and synchronises a fragment.
- `start_quorum` loads the weights and the momentum of another replica into `DiLoCo`, and not into the model,
  if this replica is behind or if no round has been synchronised yet. torchft reads them with pickle, so
  whoever reaches the lighthouse and the replicas must be trusted.
"""

from typing import Any

from torchft.local_sgd import DiLoCo


def synchronise_untrained(diloco: DiLoCo) -> bool:
    """Load the weights of `diloco` into the model, and take part in a round with a pseudo-gradient of 0.

    Return whether the round succeeded.
    """
    restore(diloco)
    fragment: Any = diloco._fragments[0]
    fragment.prepare_sync()
    return bool(fragment.perform_sync())


def restore(diloco: DiLoCo) -> None:
    """Load the weights of the last round into the model."""
    diloco._restore_parameters()


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
