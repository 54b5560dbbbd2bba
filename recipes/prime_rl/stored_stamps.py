"""Stamp from a store: verifiers' nodes after PRIME-RL 0.8, and the samples of 0.8.

    [orchestrator.algo]
    type = "echo"
    [orchestrator.algo.filter]
    import_path = "composer_plugins.recipes.prime_rl.stored_stamps.echo_filter"
    kwargs = { store = "/shared/pairs.store" }

In PRIME-RL 0.8 nodes cannot carry stamps. The filter of the algorithm "echo" is the only function of
the user's that is called on a rollout before the trainer gets it. It is asked which observations echo trains
on. `echo_filter` selects none, so that the algorithm trains as grpo, and stamps the samples. It runs once per
rollout and blocks the orchestrator's event loop, so it uses no network.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.adapters.prime_rl_plugin.stamps import is_pair
from composer_plugins.adapters.prime_rl_plugin.values import REPLAY, Array, reference_values, stamped
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.findings import ComposerWarning
from composer_plugins.recipes.prime_rl.store import Kind, Store

FIRST_REPLAY: tuple[Kind, ...] = ("replay", "reference")

Found = tuple[Kind, Array]


def echo_filter(rollout: Any, *, store: str, kinds: Sequence[Kind] = FIRST_REPLAY) -> list[list[bool]]:
    """Stamp `rollout` from the store at `store`, and keep no observation: `algo.filter` of type "echo".

    Each sample is looked up by its token ids, under each of `kinds` in turn, and takes the first record
    found; without a record it stays as it was. The samples are stamped where the rollout has them (0.8),
    otherwise its nodes. A record that has only 0.0 at the sampled tokens is left out with a warning.
    """
    opened, samples = Store(store), upstream.samples(rollout)
    if samples is None:
        stamp_from_store(rollout, opened, kinds)
    for sample in samples or ():
        if (found := _look_up(opened, kinds, sample.token_ids)) is not None:
            with _left_out_with_a_warning():
                reference, weights = _streams(found, sample.mask)
                sample.ref_logprobs = reference.tolist()
                if weights is not None:
                    sample.rl_weights = weights.tolist()
    return [[False] * len(branch.token_ids) for branch, _ in upstream.trained_branches(rollout)]


def stamp_from_store(trace: Any, store: Store, kinds: Sequence[Kind] = FIRST_REPLAY) -> int:
    """Stamp the trained nodes of each branch found in `store` by its token ids; return how many were found.

    For `Task.finalize` or `Env.finalize`. A node in two branches takes the record of the first one, which
    trains it. A record that cannot be stamped is left out with a warning.
    """
    stamped = 0
    for branch, nodes in upstream.trained_branches(trace):
        if (found := _look_up(store, kinds, branch.token_ids)) is not None:
            with _left_out_with_a_warning():
                _stamp_branch(branch, nodes, found)
                stamped += 1
    return stamped


def _stamp_branch(branch: Any, trained: list[upstream.Node], found: Found) -> None:
    ids = {id(node) for node in trained}
    mask = [sampled and id(node) in ids for node in branch.nodes for sampled in node.mask]
    reference, weights = _streams(found, mask)
    for node in trained:
        upstream.check_node_type(type(node))
        if weights is None and is_pair(node):
            problem = f"a node of this branch of {len(mask)} tokens belongs to a pair"
            raise DataError("stored reference", problem, "store a hint or a pair for a token, not both")
    ends = np.cumsum([sum(node.mask) for node in trained])
    for node, positions in zip(trained, np.split(np.flatnonzero(mask), ends[:-1]), strict=True):
        node.reference_logprobs = reference[positions].tolist()
        if weights is not None:
            upstream.set_weights(node, weights[positions].tolist())


@contextmanager
def _left_out_with_a_warning() -> Iterator[None]:
    """Do not end a run for a record that cannot be stamped: PRIME-RL catches no error here."""
    try:
        yield
    except DataError as error:
        warnings.warn(f"left out: {error}", ComposerWarning, stacklevel=4)


def _streams(found: Found, mask: Sequence[bool]) -> tuple[Array, Array | None]:
    """The reference and the weights of a branch, one each per token, 0.0 where `mask` is False."""
    kind, values = found
    sampled, key = np.asarray(mask, dtype=bool), f"stored {kind} of {len(values)} tokens"
    if sampled.shape != values.shape:
        raise DataError(key, f"the mask has {len(sampled)}", "give one boolean per token id")
    own = np.where(sampled, values, 0.0).astype(np.float64)
    if kind == "reference":
        return np.where(sampled, stamped(reference_values(own, len(sampled), key)), 0.0), None
    if not own.any():
        problem = "it is 0.0 at every sampled token, which PRIME-RL reads as weight 1"
        raise DataError(key, problem, "store coefficients of the sampled tokens")
    return np.where(sampled, REPLAY, 0.0), own


def _look_up(store: Store, kinds: Sequence[Kind], token_ids: Sequence[int]) -> Found | None:
    if not isinstance(store, Store):
        problem = f"it is of type {type(store).__name__}"
        raise ConfigError("store", problem, "pass Store(path)")
    if isinstance(kinds, str):
        raise ConfigError("kinds", f"it is {kinds!r}, not a list", f"set [{kinds!r}]")
    for kind in kinds:
        if (values := store.get(token_ids, kind)) is not None:
            return kind, values
    return None
