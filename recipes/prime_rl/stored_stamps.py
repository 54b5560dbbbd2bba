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

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.adapters.prime_rl_plugin.stamps import is_pair
from composer_plugins.adapters.prime_rl_plugin.values import REPLAY, Array, stamped
from composer_plugins.errors import DataError
from composer_plugins.recipes.prime_rl.store import Store

Streams = tuple[Array, Array | None]  # the reference and the weights of a branch, one each per token


def echo_filter(rollout: Any, *, store: str) -> list[list[bool]]:
    """Stamp `rollout` from the store at `store`, and keep no observation: `algo.filter` of type "echo".

    The samples are stamped where the rollout has them (0.8), otherwise its nodes. A sample without a record
    stays as it was.
    """
    opened, samples = Store(store), upstream.samples(rollout)
    if samples is None:
        stamp_from_store(rollout, opened)
    for sample in samples or ():
        if (found := look_up(opened, sample.token_ids, sample.mask)) is not None:
            reference, weights = found
            sample.ref_logprobs = reference.tolist()
            if weights is not None:
                sample.rl_weights = weights.tolist()
    return [[False] * len(branch.token_ids) for branch, _ in upstream.trained_branches(rollout)]


def stamp_from_store(trace: Any, store: Store) -> int:
    """Stamp the trained nodes of each branch found in `store` by its token ids; return how many were found.

    For `Task.finalize` or `Env.finalize`. A node in two branches takes the record of the first one, which
    trains it.
    """
    count = 0
    for branch, trained in upstream.trained_branches(trace):
        ids = {id(node) for node in trained}
        mask = [sampled and id(node) in ids for node in branch.nodes for sampled in node.mask]
        if (found := look_up(store, branch.token_ids, mask)) is None:
            continue
        count += 1
        (reference, weights), positions = found, np.flatnonzero(mask)
        for node in trained:
            own, positions = np.split(positions, [upstream.sampled_count(node)])
            if weights is None and is_pair(node):
                problem = f"a node of this branch of {len(mask)} tokens belongs to a pair"
                raise DataError("stored reference", problem, "store a hint or a pair for a token, not both")
            node.reference_logprobs = reference[own].tolist()
            if weights is not None:
                upstream.set_weights(node, weights[own].tolist())
    return count


def look_up(store: Store, token_ids: Sequence[int], mask: Sequence[bool]) -> Streams | None:
    """The streams of a branch, 0.0 where `mask` is False; a pair has precedence over a hint."""
    if (weights := store.get(token_ids, "replay")) is not None:
        if not weights[np.asarray(mask)].any():
            problem = f"it is 0.0 at every sampled token of {len(mask)}, which PRIME-RL reads as weight 1"
            raise DataError("stored replay", problem, "store coefficients of the sampled tokens")
        return np.where(mask, REPLAY, 0.0), np.where(mask, weights, 0.0).astype(np.float64)
    if (reference := store.get(token_ids, "reference")) is not None:
        return np.where(mask, stamped(reference), 0.0), None
    return None
