"""Doubles of verifiers' message nodes and of PRIME-RL's samples, from their documented fields.

What a branch becomes on its way to the trainer is written here again, in plain Python: per sampled token or
per token, with what missing numbers are filled, and which stream is as good as none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from parity_tests.rigs.prime_rl_doubles import LossInputs


@dataclass
class OldMessageNode:
    """Of the verifiers that PRIME-RL 0.8.0 pins."""

    token_ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per True of the mask
    sampled: bool = False


@dataclass
class MessageNode(OldMessageNode):
    """Of verifiers since 4bcb48e55."""

    reference_logprobs: list[float] | None = None
    loss_weights: dict[str, list[float]] | None = None


@dataclass
class Branch:
    nodes: list[MessageNode]

    @property
    def token_ids(self) -> list[int]:
        return [token for node in self.nodes for token in node.token_ids]


@dataclass
class Trace:
    branches: list[Branch]


@dataclass
class TrainingSample:
    """Every stream one number per token."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None


@dataclass
class Rollout(Trace):
    """Of PRIME-RL 0.8, whose samples are made before the algorithm looks at it."""

    samples: list[TrainingSample] = field(default_factory=list)


def prompt(*token_ids: int) -> MessageNode:
    return MessageNode(list(token_ids), [False] * len(token_ids))


def answer(token_ids: Sequence[int], logprobs: Sequence[float]) -> MessageNode:
    """Sampled tokens after whatever the chat template put before them."""
    scaffold = len(token_ids) - len(logprobs)
    mask = [False] * scaffold + [True] * len(logprobs)
    return MessageNode(list(token_ids), mask, list(logprobs), sampled=True)


def samples(trace: Trace) -> list[TrainingSample]:
    """What the orchestrator makes of a trace whose nodes are stamped: a sample per branch."""
    made, seen = [], set[int]()
    for branch in trace.branches:
        mask = [m and id(node) not in seen for node in branch.nodes for m in node.mask]
        if any(mask):
            weights = [w for node in branch.nodes for w in _weights(node, id(node) in seen)]
            has_reference = any(node.reference_logprobs is not None for node in branch.nodes)
            logprobs = _spread(branch, lambda node: node.logprobs)
            reference = _spread(branch, lambda node: node.reference_logprobs) if has_reference else None
            # A stream of zeros is none.
            given = reference, weights if any(weights) else None
            made.append(TrainingSample(branch.token_ids, mask, logprobs, *given))
        seen |= {id(node) for node in branch.nodes if node.sampled}
    return made


def inputs(made: Sequence[TrainingSample], dtype: torch.dtype = torch.float64) -> list[LossInputs]:
    """What the loss is given for samples packed together: a stream that one has, all have."""
    with_reference = any(sample.ref_logprobs is not None for sample in made)
    with_weights = any(sample.rl_weights is not None for sample in made)
    given = []
    for sample in made:
        count = len(sample.token_ids)
        logprobs = torch.tensor(sample.logprobs, dtype=dtype)
        reference = torch.tensor(sample.ref_logprobs or [0.0] * count, dtype=dtype)
        weights = torch.tensor(sample.rl_weights or [1.0] * count, dtype=dtype)
        mask = torch.tensor(sample.mask)
        given.append(
            LossInputs(
                logprobs.clone().requires_grad_(),
                logprobs,
                reference if with_reference else None,
                torch.zeros(count, dtype=dtype),
                mask & (weights != 0) if with_weights else mask,
                weights if with_weights else None,
            )
        )
    return given


def _spread(branch: Branch, values: Callable[[MessageNode], list[float] | None]) -> list[float]:
    out: list[float] = []
    for node in branch.nodes:
        left = iter(values(node) or [])
        out += [next(left, 0.0) if sampled else 0.0 for sampled in node.mask]
    return out


def _weights(node: MessageNode, seen: bool) -> list[float]:
    stream = (node.loss_weights or {}).get("rl")
    if stream is None or seen:
        return [0.0] * len(node.token_ids)
    assert len(stream) == len(node.token_ids)
    return stream
