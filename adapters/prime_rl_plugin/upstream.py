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
from composer_plugins.frameworks.prime_rl import (
    FEATURES,
    GENERATIONS,
    HEAD,
    LOSS_NAMES,
    NEWEST_TESTED,
    RELEASES,
    SAMPLES_SINCE,
    TESTED,
    UNTESTED,
    VERIFIERS_SINCE,
    Generation,
)
from composer_plugins.losses.inputs import LARGEST_LOGPROB, positive_logprob

if TYPE_CHECKING:  # the doctor loads no torch
    from torch import Tensor

# --- Releases ------------------------------------------------------------------------------------------

DISTRIBUTION = "prime-rl"
# What its own losses report, here under the same names.
METRICS = frozenset({"mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl"})
METRICS |= {"is_masked", "is_masked_low", "is_masked_high"}
# What `doctor/probe.py` is given to find the installed release: distribution, package, files and strings.
INSTALLATION = (DISTRIBUTION, "prime_rl", [(file, word) for _, file, word, _ in FEATURES])


def installed() -> str | None:
    """PRIME-RL's version in this environment, without importing it."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def generation_of(release: str | None) -> Generation:
    """The generation of a release by its number or the pull request that began it; the newest tested if None.

    A release that is newer than those with a number has the contract of the newest source.
    """
    if release is None or release == "559b447":
        return TESTED
    if release.upper() == "HEAD":
        return HEAD
    if by_request := [one for one in UNTESTED if one.since.lstrip("#") == release.lstrip("#")]:
        return by_request[0]
    number = _number(release)
    if number < _number(GENERATIONS[0].since):
        problem = f"PRIME-RL {release} takes no custom loss"
        raise ConfigError("--version", problem, "upgrade PRIME-RL to 0.5 or later, or name another version")
    if number > _number(NEWEST_TESTED):
        return HEAD
    tested = GENERATIONS[: -len(UNTESTED)]
    return [one for one in tested if _number(one.since) <= number][-1]


def release_of(version: str) -> str:
    """The one of the releases whose keys are known that this version is nearest to, from above."""
    if generation_of(version) in (TESTED, *UNTESTED):
        return RELEASES[-1]
    return [one for one in RELEASES if _number(one) <= _number(version)][-1]


def generation_by_features(found: Sequence[bool | None]) -> Generation | None:
    """The generation whose strings the probe found in the source; None if there is no source.

    `found` says for each of `FEATURES` whether the file has the string, and None for an absent file.
    """
    for (generation, _, _, is_there), has in zip(FEATURES, found, strict=True):
        if has is is_there:
            return generation
    return None


def _number(release: str) -> tuple[float, ...]:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?dev(\d+))?", release)
    if found is None:
        raise ConfigError(
            "--version", f"{release!r} is not a version", "write 0.8.0, 0.8.1.dev52, 559b447, 3418 or HEAD"
        )
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
    # [tokens, entries] each: the policy's and the rollout engine's, of every entry in the sampler's mask
    support: "tuple[Tensor, Tensor] | None"


STREAMS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask")
REFERENCES = ("ref_logprobs", "teacher_logprobs")  # the second one before 0.7
WEIGHTS = "loss_weights"
SUPPORTS = ("trainer_mask_logprobs", "inference_mask_logprobs")  # after 559b447
SUPPORT_OPTION = "enable_return_sampling_mask_logprobs"  # of [inference]; truncated sampling has such a mask


def streams(inputs: Any) -> Streams:
    """The fields of LossInputs; DataError without one that every release has, or with a wrong mask."""
    given: list[Any] = [getattr(inputs, name, None) for name in STREAMS]
    if absent := [name for name, x in zip(STREAMS, given, strict=True) if x is None]:
        remedy = "point import_path at a function that PRIME-RL calls with its LossInputs"
        raise DataError("LossInputs", f"there is no {' and no '.join(absent)}", remedy)
    reference = next((getattr(inputs, name) for name in REFERENCES if hasattr(inputs, name)), None)
    logprobs, rollout_logprobs, advantages, mask = given
    if str(kind := getattr(mask, "dtype", type(mask).__name__)) != "torch.bool":
        raise DataError(STREAMS[-1], f"it is {kind}", "pass a tensor of booleans")
    weights = getattr(inputs, WEIGHTS, None)
    policy, rollout = (getattr(inputs, name, None) for name in SUPPORTS)
    support = None if policy is None or rollout is None else (policy, rollout)
    return Streams(logprobs, rollout_logprobs, advantages, mask, reference, weights, support)


def check_streams(inputs: Any, found: Streams, *, needs_reference: bool) -> None:
    """Raise DataError for a wrong type or shape, and for positive log-probabilities of policy and engine.

    Looking at their values waits for the device: the adapter calls this for the first inputs of each kind.
    """
    import torch

    if needs_reference and not any(hasattr(inputs, name) for name in REFERENCES):
        problem = f"there is no {' and no '.join(REFERENCES)}, which a hint needs"
        raise DataError("LossInputs", problem, "remove the hint: this PRIME-RL cannot carry it")
    names, mask = (*STREAMS, REFERENCES[0], WEIGHTS), found.mask
    given = {name: x for name, x in zip(names, found[:-1], strict=True) if x is not None}
    given |= dict(zip(SUPPORTS, found.support or (), strict=False))
    for name, x in given.items():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        if x is not mask and not getattr(kind, "is_floating_point", False):
            raise DataError(name, f"it is {kind}", "pass a tensor of floating point")
    for name, x in given.items():
        shape = x.shape[:1] if name in SUPPORTS and x.dim() == 2 else x.shape
        if shape != mask.shape or mask.dim() != 1 or not mask.numel():
            problem = f"its shape is {tuple(x.shape)}, and that of loss_mask {tuple(mask.shape)}"
            raise DataError(name, problem, "pass [tokens] for both, one packed sequence")
    for name in STREAMS[:2]:
        values = given[name].detach()[mask]
        if (wrong := values[values > LARGEST_LOGPROB]).numel():
            raise positive_logprob(name, f"{float(wrong[0]):.4g} at an unmasked token")


def generation_of_inputs(inputs: Any, release: str | None) -> Generation:
    """The generation of the PRIME-RL that made these LossInputs, by their fields and the names of its module.

    Its `release` is used only for inputs of which no module of PRIME-RL is known.
    """
    module = sys.modules.get(type(inputs).__module__)
    names = vars(module) if module is not None and "LossInputs" in vars(module) else {}
    by_name = next((one for one, name in LOSS_NAMES if name in names), None)
    if hasattr(inputs, SUPPORTS[0]):
        return HEAD
    if by_name is not None:
        return by_name
    if names and "default_loss_fn" not in names:
        return UNTESTED[0]
    if hasattr(inputs, WEIGHTS):
        return TESTED
    return GENERATIONS[2] if not names and (release or "").startswith("0.6") else GENERATIONS[1]


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
SAMPLE_FIELDS = ("ref_logprobs", "rl_weights")
POLICY_STREAM = "rl"  # the weights of the custom loss; a node may carry those of PRIME-RL's other losses too


def weights(node: Node) -> list[float] | None:
    """The weights of the custom loss that the node carries, one per token."""
    return (node.loss_weights or {}).get(POLICY_STREAM)


def set_weights(node: Node, per_sampled: Sequence[float]) -> None:
    """Give the node one weight per sampled token, beside the weights of PRIME-RL's other losses."""
    left = iter(per_sampled)
    own = [next(left) if sampled else 0.0 for sampled in node.mask]
    node.loss_weights = (node.loss_weights or {}) | {POLICY_STREAM: own}


def check_node_type(node_type: type) -> None:
    """ConfigError unless nodes of this type, `verifiers.v1.graph.MessageNode`, can carry a stamp.

    Call it where an environment is built: an old verifiers is then found before the first rollout.
    """
    fields = getattr(node_type, "model_fields", None) or getattr(node_type, "__dataclass_fields__", {})
    if absent := [name for name in NODE_FIELDS if name not in fields]:
        raise ConfigError(
            node_type.__name__,
            f"there is no {' and no '.join(absent)}, which verifiers has since {VERIFIERS_SINCE}, and which "
            f"PRIME-RL passes on since {TESTED.since}",
            "upgrade, or with PRIME-RL 0.7 and 0.8 use stored_stamps.echo_filter",
        )


def sampled_count(node: Node) -> int:
    """How many of the node's tokens the policy sampled; an error if the node cannot be stamped."""
    check_node_type(type(node))
    if len(node.mask) != len(node.token_ids):
        problem = f"has {len(node.token_ids)} tokens and a mask of {len(node.mask)}"
        raise DataError("node", problem, "give one boolean per token")
    count = sum(node.mask)
    if not (node.sampled and count):
        raise DataError(
            "node", "the policy did not sample it, so it is not trained", "stamp completions only"
        )
    return count


def is_trained(node: Node) -> bool:
    """Whether PRIME-RL trains any token of this node."""
    return node.sampled and any(node.mask)


def trained_branches(trace: Any) -> Iterator[tuple[Any, list[Node]]]:
    """Each branch with nodes to train, and these nodes. A node in two branches is trained in the first one.

    `trace` is a verifiers trace, or a rollout of PRIME-RL 0.7 and 0.8.
    """
    if not hasattr(trace, "branches"):
        problem = f"it is of type {type(trace).__name__}, which has no branches"
        raise DataError("trace", problem, "pass verifiers' trace, or a rollout of PRIME-RL")
    seen: set[int] = set()
    for branch in trace.branches:
        trained = [node for node in branch.nodes if is_trained(node) and id(node) not in seen]
        seen |= {id(node) for node in trained}
        if trained:
            yield branch, trained


def samples(rollout: Any) -> list[Any] | None:
    """The samples of a rollout of PRIME-RL 0.7 and 0.8, checked; None for a later one, which has nodes."""
    found = getattr(rollout, "samples", None)
    for sample in found or ():
        if absent := [name for name in SAMPLE_FIELDS if not hasattr(sample, name)]:
            problem = f"there is no {' and no '.join(absent)}, which PRIME-RL has since {SAMPLES_SINCE}"
            raise ConfigError(type(sample).__name__, problem, "upgrade PRIME-RL")
    return found
