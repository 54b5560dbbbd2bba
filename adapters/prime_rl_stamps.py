"""Hints and replayed pairs on verifiers' nodes, for PRIME-RL after 0.8: what `prime_rl_loss` then trains on.

An environment stamps in `Task.finalize` or `Env.finalize`, where PRIME-RL's algorithms leave it alone:

    class MyTask(vf.Task):
        async def finalize(self, trace, runtime):
            for node, scores in await my_teacher(trace):
                stamp_reference(node, scores)
            check_trace(trace)

A token carries one reference and one weight: a hint or a pair, not both. Set
`[orchestrator.train] filter_zero_advantages = false`, or groups of equal reward are dropped, stamps and all.
Channels and versions: `prime_rl_parts.versions`. From a store, and on PRIME-RL 0.7 and 0.8: `prime_rl_echo`.
"""

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, cast

import numpy as np

from composer_plugins.adapters.prime_rl_parts.nodes import (
    Node,
    is_pair,
    is_trained,
    sampled_count,
    spread,
    trained_branches,
)
from composer_plugins.adapters.prime_rl_parts.signals import REPLAY
from composer_plugins.adapters.prime_rl_parts.values import (
    log_probabilities,
    numbers,
    of_kind,
    reference_values,
)
from composer_plugins.errors import ConfigError, DataError

SMALLEST = float(np.finfo(np.float32).tiny)  # the trainer's streams are float32
LARGEST = float(np.finfo(np.float32).max)


def stamp_reference(node: Node, logprobs: Sequence[float]) -> None:
    """The teacher's log-probabilities of the node's SAMPLED tokens, nats, one each and in their order.

    They are of the completion as it was sampled, under the teacher's own prompt, with the hint in it.
    They replace an earlier reference. DataError: a wrong number of them, one that is not finite or is
    positive, or 0.0 throughout, which reads as none; a node without sampled tokens, or a pair's.
    """
    count = sampled_count(node)
    if is_pair(node):
        raise DataError(
            "a reference for a node of a replayed pair: a token carries a hint or a pair, not both"
        )
    given = of_kind(logprobs, "fiu", "reference: numbers")
    if len(given) == len(node.token_ids) != count:
        raise DataError(
            f"reference: {len(given)} log-probabilities, one per token, where one per SAMPLED token is "
            f"wanted, {count}: keep those where node.mask is True"
        )
    node.reference_logprobs = reference_values(given, count, "reference").tolist()


def stamp_plain(node: Node) -> None:
    """Weight 1 for an ordinary node of a branch in which another one carries a pair's weights.

    Without it PRIME-RL takes the node out of the loss: where a branch has a stream of weights, what is
    not in it has weight 0.
    """
    count = sampled_count(node)
    if is_pair(node):
        raise DataError("a pair's node has its coefficient for a weight: stamp_plain would overwrite it")
    _weigh(node, [1.0] * count)


def stamp_replay_pair(
    chosen: Node | Sequence[Node], rejected: Node | Sequence[Node], beta: float = 0.1, weight: float = 1.0
) -> float:
    """DPO's gradient of one pair, as a coefficient per token; returns the coefficient.

        u = sum over sampled tokens of logprobs - reference_logprobs
        c = weight * beta * sigmoid(-beta (u_chosen - u_rejected)),   loss = sum of -(+c or -c) * log pi

    `logprobs` are the policy's, as the engine gave them, and `reference_logprobs` pi_ref's, which the
    mark of a pair overwrites. A completion is its node or, of several turns, its nodes; leave out what
    both completions begin with, which cancels in the margin.

    The gradient is DPO's exactly at the policy that sampled, so before the first update on the pair; c
    does not move after it, and each further update is of a staler pair. Use `replay_weight` with it.
    c is never 0, where PRIME-RL would drop the token or, of a branch of zeros, take 1 for its weight.

    Source: arXiv 2305.18290, the gradient below eq. 7.
    """
    pair = _nodes(chosen), _nodes(rejected)
    if {id(node) for node in pair[0]} & {id(node) for node in pair[1]}:
        raise DataError("a node of both completions: leave out what they have in common, it cancels")
    coefficient = dpo_coefficient(_margin(pair[0]) - _margin(pair[1]), beta=beta, weight=weight)
    for nodes, signed in zip(pair, (coefficient, -coefficient), strict=True):
        for node in nodes:
            count = sampled_count(node)
            node.reference_logprobs = [REPLAY] * count
            _weigh(node, [signed] * count)
    return coefficient


def dpo_coefficient(margin: float, *, beta: float = 0.1, weight: float = 1.0) -> float:
    """weight * beta * sigmoid(-beta * margin), margin = u_chosen - u_rejected; at least float32's smallest.

    + this is the chosen's coefficient per token, - this the rejected's: -d loss / d log pi of DPO.
    """
    for name, value in (("beta", beta), ("weight", weight)):
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(
                f"{name} = {value!r}: a positive number wanted; leave an unwanted pair unstamped"
            )
    if not math.isfinite(margin):
        raise DataError(f"margin = {margin}: a finite number wanted")
    scale = float(weight * beta)
    if scale > LARGEST:
        raise ConfigError(f"weight * beta = {scale:g}: beyond float32, in which the trainer has its weights")
    steep = min(beta * margin, -math.log(sys.float_info.min))
    return max(scale / (1 + math.exp(steep)), SMALLEST)


def check_trace(trace: Any) -> None:
    """DataError where a branch of `trace` (or the nodes of one) is stamped in part, or with what is no stamp.

    PRIME-RL fills what is missing in a branch: a weight with 0, which takes the node out of the loss, and
    a reference with 0.0, which is a teacher's who is certain of every token.
    """
    if not hasattr(trace, "branches"):
        _check_nodes([node for node in trace if is_trained(node)])
        return
    for _, parts in trained_branches(trace):
        _check_nodes([part.node for part in parts if part.trained])


def _check_nodes(nodes: list[Node]) -> None:
    weights = [(node.loss_weights or {}).get("rl") for node in nodes]
    plain = [node for node in nodes if not is_pair(node)]
    with_reference = sum(node.reference_logprobs is not None for node in plain)
    with_weights = sum(stream is not None for stream in weights)
    if 0 < with_reference < len(plain):
        raise DataError(
            f"{with_reference} of a branch's {len(plain)} trained nodes carry a reference: the others would "
            "read as a teacher's who is certain. stamp_reference all of them, or none"
        )
    if 0 < with_weights < len(nodes):
        raise DataError(
            f"{with_weights} of a branch's {len(nodes)} trained nodes carry a weight: the others would be "
            "taken out of the loss. stamp_plain those that are no pair's"
        )
    for node, stream in zip(nodes, weights, strict=True):
        _check_mark(node, stream)
        if stream is not None:
            numbers(stream, len(node.token_ids), "loss_weights['rl']")
    if with_reference:
        streams = [
            log_probabilities(node.reference_logprobs or (), sampled_count(node), "reference")
            for node in plain
        ]
        joined = np.concatenate(streams)
        reference_values(joined, len(joined), "reference of a branch")
    if with_weights and not any(any(stream or ()) for stream in weights):
        raise DataError("a branch whose weights are all 0.0, which PRIME-RL reads as none: weight 1")


def _check_mark(node: Node, weights: list[float] | None) -> None:
    """Of a pair's node: the mark at each sampled token, and weights beside it."""
    if not is_pair(node):
        return
    count, marks = sampled_count(node), node.reference_logprobs or []
    if marks != [REPLAY] * count:
        found = sum(value == REPLAY for value in marks)
        raise DataError(
            f"a pair's mark at {found} of {count} sampled tokens: a node is a pair's, or it is not"
        )
    if weights is None:
        raise DataError("a pair's mark without its weights: stamp_replay_pair gives both")


def _nodes(completion: Node | Sequence[Node]) -> list[Node]:
    is_one = hasattr(completion, "token_ids")
    nodes = [cast(Node, completion)] if is_one else list(cast(Sequence[Node], completion))
    if not nodes:
        raise DataError("a completion without nodes")
    if len({id(node) for node in nodes}) < len(nodes):
        raise DataError("a node twice in a completion: its tokens would count twice in the margin")
    return nodes


def _margin(nodes: Sequence[Node]) -> float:
    """u of one completion, of the nodes' policy and reference."""
    terms: list[float] = []
    for node in nodes:
        count = sampled_count(node)
        if is_pair(node):
            raise DataError("a node of a pair already: its reference went with the first stamp")
        if node.reference_logprobs is None:
            raise DataError(
                "a pair's node without reference_logprobs: stamp_reference it with pi_ref's first"
            )
        reference = log_probabilities(node.reference_logprobs, count, "reference_logprobs")
        policy = log_probabilities(node.logprobs, count, "logprobs")
        terms += (policy - reference).tolist()
    return math.fsum(terms)


def _weigh(node: Node, per_sampled: list[float]) -> None:
    """Give the node its weights for the policy's loss, beside whatever other streams it has."""
    node.loss_weights = (node.loss_weights or {}) | {"rl": spread(node, per_sampled)}
