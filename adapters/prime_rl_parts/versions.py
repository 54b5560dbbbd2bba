"""What each PRIME-RL can carry to a custom loss, and what it divides by: its contract changed four times.

The tag is not in the installed version (HEAD after v0.8.0 still says 0.8.0), so whoever holds a
`LossInputs` looks at its fields, and whoever holds a verifiers node at the node's.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

DISTRIBUTION = "prime-rl"


class Generation(NamedTuple):
    """A run of PRIME-RL releases with one loss contract; a channel that is "" cannot be carried."""

    since: str
    until: str  # the first that is not of it; "" for the newest
    reference: str  # the field of LossInputs with a reference's log-probabilities
    loss_weights: bool
    denominator: str
    hint: str
    replay: str


GENERATIONS = (
    Generation("0.4", "0.5", "teacher_logprobs", False, "micro-batches", "orchestrator.teacher_model", ""),
    Generation(
        "0.5", "0.6", "teacher_logprobs", False, "this rank's tokens", "orchestrator.teacher_model", ""
    ),
    Generation("0.6", "0.7", "teacher_logprobs", False, "global tokens", "", ""),
    Generation("0.7", "0.8.1.dev52", "ref_logprobs", True, "global tokens", "echo filter", "echo filter"),
    Generation("0.8.1.dev52", "", "ref_logprobs", True, "global tokens", "verifiers node", "verifiers node"),
)


def installed() -> str | None:
    """PRIME-RL's version in this environment, without importing it."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def runs_no_teacher_beside_rl(release: str | None) -> bool:
    """Of v0.6, whose LossInputs looks like v0.5's: it refuses a teacher in a run with RL."""
    return release is not None and release.split(".")[:2] == ["0", "6"]
