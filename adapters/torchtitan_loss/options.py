"""The fields of `ComposerLoss.Config`, checked once, and what of them torchtitan cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.errors import ConfigError, Finding, Findings, enforce, in_a_line
from composer_plugins.frameworks.torchtitan import BY_SEQUENCE, MODE, TORCHTITAN, UNAVAILABLE
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.asking import Asked, ask
from composer_plugins.objective.rules import sum_over_tokens

DEFAULT_POLICY = "grpo@torchtitan"
MEASURED = ("health", "record_batches", "record_every")
FIELDS = ("policy", "policy_params", "policy_weight", *MEASURED, *UNAVAILABLE)  # of ComposerLoss.Config


_requested: dict[str, Asked] = {}


def requested(fields: Mapping[str, Any]) -> Asked:
    """What these fields of the config ask for, parsed once in a process.

    Raises one ConfigError for all that is wrong, and warns of what is probably not intended.
    """
    ours = {name: fields[name] for name in FIELDS if name in fields}  # a class derived from ours has more
    key = repr(sorted(ours.items()))
    if key not in _requested:
        asked, found = parse(ours)
        enforce(found)
        assert asked is not None
        _requested[key] = asked
    return _requested[key]


def parse(fields: Mapping[str, Any]) -> tuple[Asked | None, Findings]:
    """What these fields ask for, and what of it is wrong or torchtitan cannot run."""
    asked, found = ask(TORCHTITAN, fields, defaults={"policy": DEFAULT_POLICY})
    if asked is not None:
        policy = asked.choice
        found += sum_over_tokens(policy, TORCHTITAN, MODE, "global_valid_tokens", policy.option)
        with found.collected():
            found += of_a_row(policy)
    return asked, found


def of_a_row(policy: Choice) -> Iterator[Finding]:
    """Yield an error for a loss of whole sequences."""
    from composer_plugins.losses.by_token import depends_on_its_row  # loads torch

    try:
        # A probe can miss it: cppo depends on the other tokens only after a prefix that has moved far.
        declared = policy.loss.per_sequence or policy.loss.over_sequence
        depends = declared or depends_on_its_row(policy)
    except ConfigError:
        raise
    except Exception as error:  # of a function of the user's, which may need a GPU
        problem = f"{policy.name!r} cannot be called on a CPU ({in_a_line(error)}), so it may be a loss of "
        problem += f"whole sequences: {BY_SEQUENCE[0]}"
        remedy = "make sure that each of its terms depends on a single token"
        yield Finding("warning", policy.option, problem, remedy)
        return
    if depends:
        problem = f"{policy.name!r} is a loss of whole sequences, and {BY_SEQUENCE[0]}"
        yield Finding("error", policy.option, problem, BY_SEQUENCE[1])
