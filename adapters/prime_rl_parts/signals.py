"""How a hint or a replayed pair travels to the loss, in the only float streams that PRIME-RL hands on.

A token has one `ref_logprobs` entry and, since v0.7, one `loss_weights` entry. A hint is a reference: the
teacher's log-probability, at most 0. A replayed token has no use for one, so that a positive entry, which
no log-probability is, says "this token is a pair's", and its weight is the pair's signed coefficient.
"""

from torch import Tensor

REPLAY = 1.0  # as a reference log-probability
MARKED = 0.5  # above it: an engine's log-probability may round to a little above 0


def is_replay(reference: Tensor) -> Tensor:
    """Where a token belongs to a replayed pair."""
    return reference > MARKED


def has_reference(reference: Tensor, live: Tensor) -> Tensor:
    """Whether the live tokens have a reference at all, as a 0-dimensional boolean on their device.

    Packing writes 0.0 at every token of a sequence that has none. A single 0.0 is a certain token's.
    """
    return (live & (reference != 0)).any()
