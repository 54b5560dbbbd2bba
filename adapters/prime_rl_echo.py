"""Stamps from a store: for nodes (PRIME-RL after 0.8), and for 0.7 and 0.8, whose nodes cannot carry them.

    [orchestrator.algo]
    type = "echo"
    [orchestrator.algo.filter]
    import_path = "composer_plugins.adapters.prime_rl_echo.echo_filter"
    kwargs = { store = "/shared/pairs.store" }

The filter is the only function of a user's that those two call on a rollout before it is sent to the
trainer. It is asked which observations echo shall train on, says none, and stamps the samples meanwhile:
the algorithm is then grpo. It is called once per rollout and holds the event loop, so it asks no network.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from composer_plugins.adapters.prime_rl_parts.nodes import (
    Part,
    check_node_type,
    is_pair,
    spread,
    trained_branches,
)
from composer_plugins.adapters.prime_rl_parts.signals import REPLAY
from composer_plugins.adapters.prime_rl_parts.values import Array, reference_values
from composer_plugins.adapters.prime_rl_store import KINDS, Kind, Store
from composer_plugins.errors import ConfigError, DataError, unknown

FIELDS = ("ref_logprobs", "rl_weights")
FIRST_REPLAY: tuple[Kind, ...] = ("replay", "reference")

Found = tuple[Kind, Array]


def echo_filter(rollout: Any, *, store: str, kinds: Sequence[Kind] = FIRST_REPLAY) -> list[list[bool]]:
    """`algo.filter` of type "echo": stamps `rollout` from the store at `store`, keeps no observation.

    Each sample is looked up by its token ids, under each of `kinds` in turn, and takes the first record
    found; one without a record stays as it was. Samples are stamped where the rollout has them (0.7 and
    0.8), else its nodes. Records flushed since the last call are seen. A record that cannot be stamped, of
    which nothing but 0.0 is left at the sampled tokens, is left out with a warning.
    """
    opened = _store(store)
    opened.refresh()
    if hasattr(rollout, "samples"):
        for sample in rollout.samples:
            _stamp_sample(sample, _look_up(opened, kinds, sample.token_ids))
    else:
        stamp_from_store(rollout, opened, kinds)
    return [[False] * len(branch.token_ids) for branch, _ in trained_branches(rollout)]


def stamp_from_store(trace: Any, store: Store, kinds: Sequence[Kind] = FIRST_REPLAY) -> int:
    """Stamp the trained nodes of each branch found in `store` by its token ids; returns how many were found.

    For `Task.finalize` or `Env.finalize`. A node in two branches follows the first, which trains it. A
    record that cannot be stamped, as a reference beside the weights of a pair, is left out with a warning.
    """
    stamped = 0
    for branch, parts in trained_branches(trace):
        if (found := _look_up(store, kinds, branch.token_ids)) is not None:
            with _left_out():
                _stamp_branch(parts, found)
                stamped += 1
    return stamped


def _stamp_branch(parts: list[Part], found: Found) -> None:
    mask = [part.trained and sampled for part in parts for sampled in part.node.mask]
    reference, weights = _streams(found, mask)
    trained = [(node, start + np.flatnonzero(node.mask)) for node, start, is_trained in parts if is_trained]
    for node, _ in trained:
        check_node_type(type(node))
        if weights is None and is_pair(node):
            raise DataError(
                f"the reference stored for a branch of {len(mask)} tokens, in which a node is a pair's: "
                "a token carries a hint or a pair, not both"
            )
    for node, sampled in trained:
        node.reference_logprobs = [reference[i] for i in sampled]
        if weights is not None:
            own = spread(node, [weights[i] for i in sampled])
            node.loss_weights = (node.loss_weights or {}) | {"rl": own}


def _stamp_sample(sample: Any, found: Found | None) -> None:
    if missing := [name for name in FIELDS if not hasattr(sample, name)]:
        raise ConfigError(
            f"{type(sample).__name__} has no {' and no '.join(missing)}: PRIME-RL has them since 0.7"
        )
    if found is None:
        return
    with _left_out():
        sample.ref_logprobs, weights = _streams(found, sample.mask)
        if weights is not None:
            sample.rl_weights = weights


@contextmanager
def _left_out() -> Iterator[None]:
    """A record that cannot be stamped ends no run: PRIME-RL catches nothing here."""
    try:
        yield
    except DataError as error:
        warnings.warn(f"left out: {error}", stacklevel=3)


def _streams(found: Found, mask: Iterable[bool]) -> tuple[list[float], list[float] | None]:
    """The reference and the weights of a branch, one each per token, 0.0 where `mask` is False."""
    kind, values = found
    live = np.asarray(mask, dtype=bool)
    what = f"the {kind} stored for a branch of {len(live)} tokens"
    own = np.where(live, values, 0.0).astype(np.float64)
    if kind == "reference":
        return reference_values(own, len(live), what).tolist(), None
    if not own.any():
        raise DataError(f"{what}: 0.0 at every sampled token, which PRIME-RL reads as no weights: weight 1")
    return np.where(live, REPLAY, 0.0).tolist(), own.tolist()


def _look_up(store: Store, kinds: Sequence[Kind], token_ids: Sequence[int]) -> Found | None:
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind of record", kind, KINDS)
        if (values := store.get(token_ids, kind)) is not None:
            return kind, values
    return None


_store: Callable[[str], Store] = cache(Store)
