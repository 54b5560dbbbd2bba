"""The fields of `ComposerLoss.Config`, checked once, and what of them torchtitan cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, unlikely
from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks.torchtitan import BY_SEQUENCE, MODE, NOT_DELIVERED, TORCHTITAN
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.rules import sum_over_tokens

DEFAULT_POLICY = "grpo@torchtitan"
FIELDS = ("policy", "policy_params", "policy_weight", *NOT_DELIVERED)  # of ComposerLoss.Config


class Requested(NamedTuple):
    """The policy loss that is asked for, checked, and the config that names it."""

    policy: Choice
    config: ComposerConfig


_requested: dict[str, Requested] = {}


def requested(fields: Mapping[str, Any]) -> Requested:
    """What these fields of the config ask for, parsed once in a process.

    Raises one ConfigError for all that is wrong, and warns of what is probably not intended.
    """
    key = repr(sorted(fields.items()))
    if key not in _requested:
        found, findings = parse(fields)
        enforce(findings)
        _requested[key] = found
    return _requested[key]


def parse(fields: Mapping[str, Any]) -> tuple[Requested, Findings]:
    """The policy loss of these fields, and warnings; ConfigError for what torchtitan cannot run."""
    asked = {name: why for name, why in NOT_DELIVERED.items() if fields.get(name)}
    wrong = Findings(
        Finding("error", k, f"it is {fields[k]!r}, and {why}", do) for k, (why, do) in asked.items()
    )
    with wrong.collected():
        options = {name: x for name, x in fields.items() if name not in NOT_DELIVERED}
        config = ComposerConfig.parse({"policy": DEFAULT_POLICY} | options)
        policy = config.choose_policy()
        TORCHTITAN.require(policy)
        reduced = sum_over_tokens(policy, TORCHTITAN, MODE, "global_valid_tokens", policy.option)
        found = Findings([*of_a_row(policy), *unlikely(policy), *reduced])
        enforce([*wrong, *(one for one in found if one.severity == "error")])
        return Requested(policy, config), found
    enforce(wrong)
    raise AssertionError  # `enforce` has raised


def of_a_row(policy: Choice) -> Iterator[Finding]:
    """Yield an error for a loss of whole sequences."""
    from composer_plugins.losses.by_token import depends_on_its_row  # loads torch

    try:
        # Where the row says so, a probe need not see it: of cppo it takes a prefix that has moved far.
        declared = policy.loss.per_sequence or policy.loss.over_sequence
        depends = declared or depends_on_its_row(policy)
    except ConfigError:
        raise
    except Exception as error:  # of a function of the user's, which may need a GPU
        problem = (
            f"{policy.name!r} cannot be called on a CPU ({in_a_line(error)}), so it may be a loss of whole "
        )
        remedy = "make sure that its terms are those of single tokens"
        yield Finding("warning", policy.option, f"{problem}sequences: {BY_SEQUENCE[0]}", remedy)
        return
    if depends:
        problem = f"{policy.name!r} is a loss of whole sequences, and {BY_SEQUENCE[0]}"
        yield Finding("error", policy.option, problem, BY_SEQUENCE[1])
