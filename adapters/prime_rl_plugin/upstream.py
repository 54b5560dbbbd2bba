"""What this adapter relies on in PRIME-RL and verifiers: how a release is told, and the fields of objects.

To port the adapter to another release, begin here and in `frameworks/prime_rl.py`, which has its losses and
options. Neither package is imported: their objects are read by the fields below.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.frameworks.prime_rl import COMMIT, NEWEST_TESTED, NODES_SINCE, OLDEST
from composer_plugins.losses.inputs import LARGEST_LOGPROB, positive_logprob

if TYPE_CHECKING:  # the doctor loads no torch
    from torch import Tensor

# --- Releases ------------------------------------------------------------------------------------------

DISTRIBUTION = "prime-rl"
# What its own losses report, here under the same names.
METRICS = frozenset({"mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl"})
METRICS |= {"is_masked", "is_masked_low", "is_masked_high"}
LOSSES = "prime_rl.trainer.rl.loss"  # the module with its losses and LossInputs
# Everything after v0.8.0 says 0.8.0 in its metadata. A function that the tested releases have in that module,
# and that later ones have not.
DEFAULT_LOSS = "default_loss_fn"
# What `doctor/probe.py` is given to find the installed release: distribution, package, file and word.
INSTALLATION = (DISTRIBUTION, "prime_rl", "trainer/rl/loss.py", DEFAULT_LOSS)
# Its classes of an rl.toml and of a trainer's own file.
RL_CONFIG = ("prime_rl.configs.rl", "RLConfig")
TRAINER_CONFIG = ("prime_rl.configs.trainer", "TrainerConfig")
VERIFIERS_SINCE = "commit 4bcb48e55 of August 2026"  # the first verifiers whose nodes carry a stamp


def installed() -> str | None:
    """PRIME-RL's version in this environment, without importing it."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def older(release: str) -> ConfigError:
    """The error for a release before the oldest one that is tested."""
    problem = f"PRIME-RL {release} is older than {OLDEST}, the oldest that is tested"
    return ConfigError("prime-rl", problem, f"install v{OLDEST} or newer")


def require(release: str | None) -> None:
    """Raise ConfigError for a release before the oldest one that is tested; None is the newest tested."""
    if release not in (None, COMMIT) and _number(str(release)) < _number(OLDEST):
        raise older(str(release))


def is_newer(release: str | None) -> bool:
    """Whether a release is newer than the newest that was tested."""
    return release not in (None, COMMIT) and _number(str(release)) > _number(NEWEST_TESTED)


def _number(release: str) -> tuple[float, ...]:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?dev(\d+))?", release)
    if found is None:
        remedy = f"write 0.8.0, 0.8.1.dev52 or {COMMIT}"
        raise ConfigError("--version", f"{release!r} is not a version", remedy)
    major, minor, patch, dev = found.groups()
    return int(major), int(minor), int(patch or 0), float(dev or "inf") if patch else 0.0


# --- What the loss is called with ----------------------------------------------------------------------


class Streams(NamedTuple):
    """PRIME-RL's LossInputs under the catalogue's names: one packed sequence, [tokens] each."""

    logprobs: "Tensor"
    rollout_logprobs: "Tensor"
    advantages: "Tensor"
    mask: "Tensor"
    reference: "Tensor | None"
    weights: "Tensor | None"


STREAMS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
REFERENCE, WEIGHTS = "ref_logprobs", "loss_weights"


def streams(inputs: Any) -> Streams:
    """The fields of LossInputs; DataError for one that does not have the shape of the mask."""
    # A release without weights is an error of `check_release`.
    reference, weights = getattr(inputs, REFERENCE), getattr(inputs, WEIGHTS, None)
    logprobs, rollout_logprobs, advantages, mask = (getattr(inputs, name) for name in STREAMS)
    found = Streams(logprobs, rollout_logprobs, advantages, mask, reference, weights)
    for name, x in zip((*STREAMS, REFERENCE, WEIGHTS), found, strict=True):
        if x is not None and x.shape != mask.shape:
            problem = f"its shape is {tuple(x.shape)}, and loss_mask has the shape {tuple(mask.shape)}"
            raise DataError(name, problem, "pass [tokens] for both, one packed sequence")
    return found


def check_logprobs(found: Streams) -> None:
    """Raise DataError for positive log-probabilities of policy and engine. It waits for the device."""
    for name, x in zip(STREAMS[:2], (found.logprobs, found.rollout_logprobs), strict=True):
        values = x.detach()[found.mask]
        if (wrong := values[values > LARGEST_LOGPROB]).numel():
            raise positive_logprob(name, f"{float(wrong[0]):.4g} at an unmasked token")


def check_release(inputs: Any) -> bool:
    """Whether the PRIME-RL that made these LossInputs is newer than tested; ConfigError if it is older."""
    require(release := installed())
    if not hasattr(inputs, WEIGHTS):
        raise older(release or f"whose LossInputs has no {WEIGHTS}")
    is_theirs = type(inputs).__module__ == LOSSES
    return is_newer(release) or is_theirs and not hasattr(sys.modules[LOSSES], DEFAULT_LOSS)


# --- verifiers' nodes, and PRIME-RL's samples ----------------------------------------------------------


class Node(Protocol):
    """A message of verifiers. `sampled_count` checks that it has the last two fields, which are newer."""

    sampled: bool
    token_ids: list[int]
    mask: list[bool]  # True at the tokens that the policy sampled
    logprobs: list[float]  # one per sampled token
    reference_logprobs: list[float] | None  # one per sampled token
    loss_weights: dict[str, list[float]] | None  # one per token, by the name of PRIME-RL's loss


NODE_FIELDS = ("reference_logprobs", "loss_weights")
POLICY_STREAM = "rl"  # the weights of the custom loss; PRIME-RL's other losses have streams of their own


def weights(node: Node) -> list[float] | None:
    """The weights of the custom loss that the node carries, one per token."""
    return (node.loss_weights or {}).get(POLICY_STREAM)


def set_weights(node: Node, per_sampled: Sequence[float]) -> None:
    """Give the node one weight per sampled token, next to the weights of PRIME-RL's other losses."""
    left = iter(per_sampled)
    own = [next(left) if sampled else 0.0 for sampled in node.mask]
    node.loss_weights = (node.loss_weights or {}) | {POLICY_STREAM: own}


def check_node_type(node_type: type) -> None:
    """ConfigError unless nodes of this type, `verifiers.v1.graph.MessageNode`, can carry a stamp.

    Call it where an environment is built: an old verifiers is then found before the first rollout.
    """
    fields = getattr(node_type, "model_fields", None) or getattr(node_type, "__dataclass_fields__", {})
    if absent := [name for name in NODE_FIELDS if name not in fields]:
        problem = f"there is no {' and no '.join(absent)}, which verifiers has since {VERIFIERS_SINCE}, and "
        problem += f"which PRIME-RL passes on since {NODES_SINCE}"
        remedy = "upgrade, or with PRIME-RL 0.8 use echo_filter of recipes.prime_rl"
        raise ConfigError(node_type.__name__, problem, remedy)


def sampled_count(node: Node) -> int:
    """How many of the node's tokens the policy sampled; an error if the node cannot be stamped."""
    check_node_type(type(node))
    count = sum(node.mask)
    if not is_trained(node):
        problem = "the policy did not sample it, so it is not trained"
        raise DataError("node", problem, "stamp completions only")
    return count


def is_trained(node: Node) -> bool:
    """Whether PRIME-RL trains any token of this node."""
    return node.sampled and any(node.mask)


def trained_branches(trace: Any) -> Iterator[tuple[Any, list[Node]]]:
    """Each branch with nodes to train, and these nodes. A node in two branches is trained in the first one.

    `trace` is a verifiers trace, or a rollout of PRIME-RL 0.8.
    """
    seen: set[int] = set()
    for branch in trace.branches:
        trained = [node for node in branch.nodes if is_trained(node) and id(node) not in seen]
        seen |= {id(node) for node in trained}
        if trained:
            yield branch, trained


def samples(rollout: Any) -> list[Any] | None:
    """The samples of a rollout of PRIME-RL 0.8; None for a later one, which has nodes."""
    return getattr(rollout, "samples", None)
