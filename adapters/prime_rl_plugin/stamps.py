"""Stamp hints and replayed pairs on verifiers' nodes, for PRIME-RL after 0.8.

A stamp is one number per token that travels with a node to the loss. An environment stamps in `Task.finalize`
or `Env.finalize`, and PRIME-RL's algorithms leave the stamps as they are:

    class MyTask(vf.Task):
        async def finalize(self, trace, runtime):
            for node, logprobs in await my_teacher(trace):
                stamp_reference(node, logprobs)
            check_trace(trace)

A token has one reference and one weight. It therefore belongs to a hint or to a pair, not to both. Set
`[orchestrator.train] filter_zero_advantages = false`: otherwise PRIME-RL drops groups of equal rewards with
their stamps. `stored_stamps` of recipes/prime_rl stamps from a store, and serves PRIME-RL 0.8.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_plugins.adapters.prime_rl_plugin import upstream, values
from composer_plugins.adapters.prime_rl_plugin.upstream import Node
from composer_plugins.adapters.prime_rl_plugin.values import REPLAY, SMALLEST
from composer_plugins.errors import ComposerWarning, ConfigError, DataError


def stamp_reference(node: Node, logprobs: Sequence[float]) -> None:
    """Stamp a teacher's log-probabilities, in nats, of the node's sampled tokens, one each, in their order.

    The teacher scores the completion as it was sampled, after its own prompt, which has the hint in it. The
    stamp replaces an earlier reference. 0.0 is stamped as the largest normal float32 below it: PRIME-RL
    writes 0.0 where nothing was stamped, and the loss warns of that. Raises DataError for a wrong number of
    values, for one that is not finite or is positive, for 0.0 throughout (which means no reference), and for
    a node that has no sampled tokens or belongs to a pair.
    """
    count = upstream.sampled_count(node)
    if is_pair(node):
        problem = "this node belongs to a replayed pair"
        raise DataError("reference", problem, "stamp a token with a hint or a pair, not both")
    node.reference_logprobs = values.stamped(values.reference_values(logprobs, count, "reference")).tolist()


def stamp_plain(node: Node) -> None:
    """Stamp weight 1 on an ordinary node of a branch in which another node belongs to a pair.

    Where a branch has a stream of weights, PRIME-RL gives weight 0 to the tokens that are not in it, and so
    takes them out of the loss.
    """
    count = upstream.sampled_count(node)
    if is_pair(node):
        raise DataError("node", "it belongs to a pair, whose coefficient this would overwrite", "leave it")
    upstream.set_weights(node, [1.0] * count)


def stamp_replay_pair(
    chosen: Node | Sequence[Node], rejected: Node | Sequence[Node], beta: float = 0.1, weight: float = 1.0
) -> float:
    """Stamp DPO's gradient of one pair as a coefficient per token, and return the coefficient.

        u = sum over sampled tokens of log pi - log pi_ref
        c = weight * beta * sigmoid(-beta (u_chosen - u_rejected)),   loss = sum of -(+c or -c) * log pi

    log pi is the engine's (`node.logprobs`), and log pi_ref the reference on the node (`stamp_reference`),
    which the mark of a pair overwrites. A completion is its node, or its nodes if it has several turns.
    Leave out the nodes that both completions begin with: they cancel.

    The gradient is exactly DPO's at the policy that sampled, which is before the first update on the pair. c
    does not change afterwards. Set `replay_weight` with it. c is never 0: PRIME-RL would take out the token.

    PRIME-RL divides the sum over pairs by the tokens of the global batch, and DPO by the number of pairs. So
    `replay_weight` = tokens / pairs, both of a typical global batch, makes the step equal to DPO's.
    Two completions with the same tokens are a warning, because their gradients cancel.

    Source: arXiv 2305.18290, the gradient below eq. 7.
    """
    pair = _nodes(chosen), _nodes(rejected)
    if len({id(node) for nodes in pair for node in nodes}) < sum(map(len, pair)):
        remedy = "pass each node once, and leave out what both completions have in common: it cancels"
        raise DataError("pair", "a node is in it twice", remedy)
    coefficient = dpo_coefficient(_margin(pair[0]) - _margin(pair[1]), beta=beta, weight=weight)
    ids, others = ([token for node in nodes for token in node.token_ids] for nodes in pair)
    if ids == others:
        problem = "pair: both completions have the same tokens, so their gradients cancel"
        warnings.warn(f"{problem}; leave the pair unstamped", ComposerWarning, stacklevel=2)
    for nodes, signed in zip(pair, (coefficient, -coefficient), strict=True):
        for node in nodes:
            count = upstream.sampled_count(node)
            node.reference_logprobs = [REPLAY] * count
            upstream.set_weights(node, [signed] * count)
    return coefficient


def dpo_coefficient(margin: float, *, beta: float = 0.1, weight: float = 1.0) -> float:
    """weight * beta * sigmoid(-beta * margin), margin = u_chosen - u_rejected; at least float32's smallest.

    It is the coefficient of the chosen completion's tokens. The rejected completion's tokens have minus it:
    -d loss / d log pi of DPO.
    """
    for name, value in (("beta", beta), ("weight", weight)):
        if not 0 < value < math.inf:
            problem = f"{value!r} is not a positive number"
            raise ConfigError(name, problem, "set a positive number, or leave the pair unstamped")
    steep = min(beta * margin, -math.log(sys.float_info.min))
    return max(weight * beta / (1 + math.exp(steep)), SMALLEST)


def is_pair(node: Node) -> bool:
    """Whether the node carries the mark of a replayed pair."""
    return any(value > values.MARKED for value in node.reference_logprobs or ())


def check_trace(trace: Any) -> None:
    """Raise DataError if only a part of a branch of `trace` is stamped, or a stamp has wrong values.

    PRIME-RL fills what is missing in a branch: a weight with 0, which takes the token out of the loss, and a
    reference with 0.0, which means probability 1. `trace` may also be a list of the nodes of one branch.
    """
    if isinstance(trace, list | tuple):
        _check_nodes([node for node in trace if upstream.is_trained(node)])
        return
    for _, nodes in upstream.trained_branches(trace):
        _check_nodes(nodes)


def _check_nodes(nodes: list[Node]) -> None:
    weights = [upstream.weights(node) for node in nodes]
    plain = [node for node in nodes if not is_pair(node)]
    with_reference = sum(node.reference_logprobs is not None for node in plain)
    with_weights = sum(stream is not None for stream in weights)
    for count, total, what, effect, call in (
        (with_reference, len(plain), "reference", "have probability 1", "stamp_reference"),
        (with_weights, len(nodes), "weight", "be taken out of the loss", "stamp_plain"),
    ):
        if 0 < count < total:
            problem = f"{count} of {total} trained nodes have one, and the others would {effect}"
            raise DataError(f"{what}s of a branch", problem, f"call {call} for the others too, or for none")
    for node, stream in zip(nodes, weights, strict=True):
        if is_pair(node):
            _check_mark(node, stream)
        if stream is not None:
            values.numbers(stream, len(node.token_ids), "weights")
    if with_reference:
        joined = np.concatenate([_reference(node) for node in plain])
        values.reference_values(joined, len(joined), "references of a branch")
    if with_weights and not any(any(stream or ()) for stream in weights):
        problem = "they are all 0.0, which PRIME-RL reads as weight 1"
        raise DataError("weights of a branch", problem, "stamp other weights, or none")


def _check_mark(node: Node, weights: list[float] | None) -> None:
    """Raise DataError unless a node of a pair has its mark at every sampled token, and weights."""
    count, marks = upstream.sampled_count(node), node.reference_logprobs or []
    if marks != [REPLAY] * count or weights is None:
        without = " without weights" * (weights is None)
        problem = f"its mark is at {marks.count(REPLAY)} of {count} sampled tokens{without}"
        raise DataError("pair", problem, "use stamp_replay_pair, which sets both")


def _nodes(completion: Any) -> list[Node]:
    nodes = [completion] if hasattr(completion, "token_ids") else list(completion)
    if not nodes:
        raise DataError("pair", "a completion has no nodes", "pass the nodes that the policy sampled")
    return nodes


def _margin(nodes: Sequence[Node]) -> float:
    """u of one completion, from the log-probabilities of the policy and the reference on its nodes."""
    terms: list[float] = []
    for node in nodes:
        count = upstream.sampled_count(node)
        if is_pair(node):
            raise DataError("pair", "a node belongs to a pair already", "pass each node in one pair only")
        if node.reference_logprobs is None:
            problem = "a node has no reference"
            raise DataError("pair", problem, "stamp pi_ref's log-probabilities first, with stamp_reference")
        terms += (values.log_probabilities(node.logprobs, count, "logprobs") - _reference(node)).tolist()
    return math.fsum(terms)


def _reference(node: Node) -> values.Array:
    return values.log_probabilities(node.reference_logprobs or (), upstream.sampled_count(node), "reference")
