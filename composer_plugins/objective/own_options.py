"""What a user asks of our loss with a framework's own terms: one `Objective` for an adapter."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from composer_plugins.config import ABSENT, ComposerConfig, entry
from composer_plugins.errors import ConfigError, Finding, Findings, enforce
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import Parameter
from composer_plugins.objective.asking import Asked, ask
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.objective import NORM, Objective, channels_of
from composer_plugins.objective.options import as_keyword, as_yaml
from composer_plugins.objective.rules import denominator_of_another

LENGTH = Parameter("of completions", low=1)
ENGINE = "rollout engine"  # the value of `Objective.old` for its log-probabilities


class Trained(NamedTuple):
    """What a framework trains with our loss in its place."""

    config: ComposerConfig
    objective: Objective


def asked(framework: Framework, table: Mapping[str, Any], options: Mapping[str, Any], **how: Any) -> Trained:
    """What `examined` reads, with a warning for each of its warnings; one ConfigError with all its errors."""
    found, findings = examined(framework, table, options, **how)
    enforce(findings)
    assert found is not None
    return found


def examined(
    framework: Framework,
    table: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    modes: tuple[str, ...],
    mode: str | None = None,
    max_length: float | None = None,
    not_ours: Mapping[str, str],
    moved: Mapping[str, Any],
    defaults: Mapping[str, Any] = NOTHING,
    at: str = "",
    write: Callable[[str, Any], str] = as_keyword,
) -> tuple[Trained | None, Findings]:
    """Read the framework's config and our `options` for it, once; None where an error leaves them open.

    `table` is the framework's config. `moved` has its options that are not at their default: the options
    of its own losses are not read. `defaults`, `at` and `write` are passed to `ask`. `modes` are the
    aggregation modes that its denominators can carry, and `mode` is the one that the user asks
    for. `not_ours` says what our loss does not do, by option of the framework, with a value that
    `Framework.not_carried` does not have.
    """
    own, found = ByTable(framework), Findings()
    for key, why in not_ours.items():
        value = entry(table, key)
        if value is not ABSENT and value not in (neutral := framework.not_carried[key]):
            remedy = f"set it to {as_yaml(neutral[-1])}"
            found.append(Finding("error", key, f"it is {value!r}, and {why}", remedy))
    if key := own.not_in_catalogue("correction", table):
        problem = f"it is {entry(table, key)!r}, no correction of the catalogue: our loss would drop it"
        found.append(Finding("error", key, problem, "remove it, or set rollout_correction"))
    theirs = (own.named("policy", table) or framework.losses[0]).row
    ours, wrong = ask(framework, options, moved, own=theirs, defaults=defaults, at=at, write=write)
    found += wrong
    if ours is None:
        return None, found
    found += _another(own, table, ours.choice)
    objective = None
    with found.collected():
        objective = own.objective(table, ours.choice)
    if objective is None:
        return None, found
    found += (one.under(at) for one in _twice(framework, objective, ours))
    if ours.correction is not None:
        objective = replace(objective, correction=ours.correction)
    with found.collected(at):
        objective = _reduced(objective, framework, found, modes, mode, max_length)
        by = {**objective.denominators, "hint_weight": objective.mode}
        objective = replace(objective, denominators=by, channels=channels_of(ours.config))
        return Trained(ours.config, objective), found
    return None, found


def _another(own: ByTable, table: Mapping[str, Any], policy: Choice) -> Iterator[Finding]:
    """Yield an error for an option that chooses one loss, where `policy` names another."""
    chosen, default = own.named("policy", table), own.framework.losses[0].row
    if chosen and (chosen.row == default or chosen.row.partition("@")[0] == policy.loss.name):
        return
    row = repr(chosen.row) if chosen else "a loss that is not in the catalogue"
    losses = (one for one in own.framework.losses if one.kind == "policy")
    others = [one.options for one in losses if one.row == default]
    for key in own.choosers:
        value = entry(table, key)
        if value is not ABSENT and value not in [options[key] for options in others]:
            problem = f"it is {value!r}, which chooses {row}, and policy names {policy.name!r}"
            yield Finding("error", key, problem, "remove one of them")


def _twice(framework: Framework, objective: Objective, asked: Asked) -> Iterator[Finding]:
    """Yield an error where the ratio of trainer to rollout engine would be in the loss two times.

    A framework's own loss may have its own correction, as there.
    """
    theirs, policy = objective.correction, objective.policy
    if theirs is not None and asked.correction is not None:
        problem = f"{framework.title}'s own options ask for {theirs.name!r} already"
        yield Finding("error", "rollout_correction", problem, "remove it, or switch those off")
    correction = asked.correction or theirs
    has_ratio = "rollout_logprobs" in policy.loss.needs or (asked.needs_old and objective.old == ENGINE)
    own = {one.row.partition("@")[0] for one in framework.losses}
    is_theirs = asked.correction is None and policy.loss.name in own
    is_told = asked.correction is not None and asked.has_rollout_ratio  # by `ask`
    if correction is not None and has_ratio and not is_theirs and not is_told:
        problem = f"policy {policy.name!r} has the ratio of trainer to rollout already, and "
        problem += f"{correction.name!r} would be the second one"
        remedy = "remove rollout_correction" if asked.correction else f"switch {framework.title}'s off"
        yield Finding("error", "policy", problem, f"{remedy}, or choose another policy")


def _reduced(
    objective: Objective,
    framework: Framework,
    found: Findings,
    modes: tuple[str, ...],
    mode: str | None,
    max_length: float | None,
) -> Objective:
    """The objective with the aggregation mode that the user asks for, or with the framework's own."""
    option = next(one for one in framework.options if one.objective == "mode")
    if mode is None:
        found += denominator_of_another(objective.policy, framework, objective.mode, option.key, modes)
        mode = objective.mode
    elif mode not in modes:
        problem = f"it is {mode!r}, for which {framework.title} has no denominator"
        raise ConfigError("mode", problem, f"set one of {', '.join(modes)}")
    if (mode == NORM) != (max_length is not None):
        problem = "it is not set" if max_length is None else f"it is {max_length!r}, and {mode!r} reads none"
        raise ConfigError("max_length", problem, f"set it with mode={NORM!r} alone")
    if max_length is not None:
        LENGTH.check("max_length", max_length, None)
    return replace(objective, mode=mode, length=max_length)
