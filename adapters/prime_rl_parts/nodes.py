"""What the stamps know about verifiers: the fields of a message node, and which of them PRIME-RL trains.

Nothing of verifiers is imported. A node is any object with `MessageNode`'s fields, a branch one with
`nodes`, a trace (PRIME-RL 0.7 and 0.8: a rollout) one with `branches`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from composer_plugins.adapters.prime_rl_parts.values import MARKED
from composer_plugins.errors import ConfigError, DataError

STAMPS = ("reference_logprobs", "loss_weights")


class Node(Protocol):
    """A message: `logprobs` and `reference_logprobs` one per sampled token, the rest one per token."""

    sampled: bool
    token_ids: list[int]
    mask: list[bool]  # True at the tokens that the policy sampled
    logprobs: list[float]
    reference_logprobs: list[float] | None
    loss_weights: dict[str, list[float]] | None


class Part(NamedTuple):
    """A node in a branch, whose tokens begin at `start`."""

    node: Node
    start: int
    trained: bool


def check_node_type(node_type: type) -> None:
    """ConfigError unless nodes of this type, `verifiers.v1.graph.MessageNode`, can carry a stamp.

    To be called where an environment is built, so that an old verifiers is found before the first rollout.
    """
    fields = getattr(node_type, "model_fields", None) or getattr(node_type, "__dataclass_fields__", {})
    if missing := [name for name in STAMPS if name not in fields]:
        raise ConfigError(
            f"{node_type.__name__} has no {' and no '.join(missing)}: verifiers' nodes have them since "
            "commit 4bcb48e55, of August 2026, and PRIME-RL passes them on since 0.8.1.dev52. With PRIME-RL "
            "0.7 and 0.8 use prime_rl_echo.echo_filter; 0.6 and older carry neither a stamped hint nor a pair"
        )


def sampled_count(node: Node) -> int:
    """How many of the node's tokens the policy sampled; an error where it cannot be stamped."""
    check_node_type(type(node))
    if len(node.mask) != len(node.token_ids):
        raise DataError(f"a node with {len(node.token_ids)} tokens and a mask of {len(node.mask)}")
    count = sum(node.mask)
    if not (node.sampled and count):
        raise DataError(
            "a node that the policy did not sample (a prompt, a tool's answer): nothing is trained"
        )
    return count


def is_trained(node: Node) -> bool:
    """Whether PRIME-RL trains any token of this node, in the first branch that it is in."""
    return node.sampled and any(node.mask)


def is_pair(node: Node) -> bool:
    """Whether the node carries the mark of a replayed pair."""
    return any(value > MARKED for value in node.reference_logprobs or ())


def spread(node: Node, values: Sequence[float]) -> list[float]:
    """One value per sampled token as one per token, 0.0 at the others."""
    left = iter(values)
    return [next(left) if sampled else 0.0 for sampled in node.mask]


def trained_branches(trace: Any) -> Iterator[tuple[Any, list[Part]]]:
    """Each branch with a token to train, and its parts: a node in two branches is trained in the first."""
    seen: set[int] = set()
    for branch in trace.branches:
        parts, start = [], 0
        for node in branch.nodes:
            trained = is_trained(node) and id(node) not in seen
            parts.append(Part(node, start, trained))
            start += len(node.token_ids)
        seen |= {id(part.node) for part in parts if part.trained}
        if any(part.trained for part in parts):
            yield branch, parts
