"""`ask`: the one way from a user's options to the losses that run, in every framework."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, scaled_hint, unlikely, what_to_set
from composer_plugins.errors import ConfigError, Finding, Findings, Severity
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.losses.choosing import Choice, find_one
from composer_plugins.losses.row import Kind, Loss
from composer_plugins.objective.options import as_keyword, not_read, pasted


class Asked(NamedTuple):
    """The losses that a user's options ask for, checked; None for a channel without a weight."""

    config: ComposerConfig
    chosen: Choice | None  # the policy loss, or the advantage; None for the framework's own policy loss
    correction: Choice | None
    hint: Choice | None
    replay: Choice | None

    @property
    def choice(self) -> Choice:
        """The loss of the kind that was asked for; it is ours."""
        assert self.chosen is not None
        return self.chosen

    @property
    def learns_from_reference(self) -> bool:
        """Whether the policy loss itself needs the log-probabilities of a reference or of a teacher."""
        return not {"teacher_logprobs", "ref_logprobs"}.isdisjoint(self.choice.loss.needs)

    @property
    def has_rollout_ratio(self) -> bool:
        """Whether the policy loss that was asked for has the ratio of trainer to rollout engine in it."""
        needs = () if self.chosen is None else self.chosen.loss.needs
        return "rollout_logprobs" in needs or self.config.old_policy == "rollout"

    @property
    def needs_old(self) -> bool:
        """Whether the policy loss needs old_logprobs."""
        return "old_logprobs" in self.choice.loss.needs


def ask(
    framework: Framework,
    ours: Mapping[str, Any],
    moved: Mapping[str, Any] = NOTHING,
    *,
    kind: Kind = "policy",
    name: str | None = None,
    own: str = "",
    framework_loss: str | None = None,
    defaults: Mapping[str, Any] = NOTHING,
    model: type[ComposerConfig] = ComposerConfig,
    at: str = "",
    given: Collection[str] | None = None,
    inert: Severity = "error",
    write: Callable[[str, Any], str] = as_keyword,
) -> tuple[Asked | None, Findings]:
    """What our options ask for in a framework, and all that is wrong or probably not meant.

    `ours` are the options that the user has written, which stand below the key `at` of the config. `moved`
    are options of the framework's own losses whose value is not their default. `name` is the loss in a
    registered name (`composer/<name>`). `own` is the framework's own loss, and the user has to name
    ours. With the value `framework_loss` of `policy` the framework keeps its own. `defaults` are the
    framework's values for our options, `model` the options that there are, and `write` writes one as the user
    does. An option of `given` (by default of `ours`) that has no effect has the severity `inert`. The losses
    are None where an error leaves them open.
    """
    found, theirs = Findings(), Findings()
    known = model.model_fields
    ours = {key: x for key, x in ours.items() if x is not None or key not in known}  # null: not set
    first: dict[str, Any] = {kind: own} if own else {}
    registered: dict[str, Any] = {kind: name} if name else {}
    # What the user has written counts before the registered name, and that before the defaults.
    values = {**first, **defaults, **registered, **ours}
    for option in [one for one in ours if one in framework.unavailable]:
        why, remedy = framework.unavailable[option]
        value = values[option]
        if option.endswith("_weight") and value == 0:  # it switches off a channel, whose options may stay
            continue
        del values[option]
        if value not in (None, {}):
            found.append(Finding("error", option, f"it is {value!r}, and {why}", remedy))
    if own and kind not in ours:
        remedy = f"name a loss: {write(kind, own)} is {framework.title}'s own"
        found.append(Finding("error", kind, "it is not set", remedy))
    if name and str(values[kind]).partition("@")[0] != name.partition("@")[0]:
        problem = f"{values[kind]!r} contradicts the name composer/{name}"
        remedy = f"remove it, or write composer in place of composer/{name}"
        found.append(Finding("error", kind, problem, remedy))
    if (row := framework.name_here(kind, values.get(kind))) and named(values, kind) is None:
        problem = f"{values[kind]!r} is {framework.title}'s own name"
        found.append(Finding("error", kind, problem, f"set {row}, its name here"))
        values[kind] = row
    params, asked = values.get(f"{kind}_params") or {}, None
    loss = named(values, kind) if moved else None  # it loads the rows of its kind
    if loss is not None and isinstance(params, Mapping):
        of_dialect: Mapping[str, Any] = NOTHING
        with suppress(ConfigError):  # a dialect that does not exist, which the config refuses
            of_dialect = find_one(values.get(kind, loss.name), kind).params
        line = pasted(framework, loss, moved, params, of_dialect)
        theirs += not_read(framework, loss, moved, line, partial(write, f"{kind}_params"))
        # What follows is found as if the line of the remedy were pasted.
        values |= {f"{kind}_params": line} if line else {}
    with found.collected():
        config = model.parse(values, framework_loss=framework_loss, unavailable=framework.unavailable)
        asked = _chosen(framework, config, kind, framework_loss)
        found += config.without_effect(values.keys() & ours.keys() if given is None else given, inert)
        for choice in filter(None, asked[1:]):
            with found.collected():
                framework.require(choice)
        found += _findings(asked) if kind == "policy" and asked.chosen else ()
        found += unlikely(asked.chosen) if asked.chosen and config.policy_weight else ()
    return asked, Findings([*theirs, *(one.under(at) for one in found)])


def named(values: Mapping[str, Any], kind: Kind) -> Loss | None:
    """The row of the loss that these options name; None for a wrong name, which the config refuses."""
    name = values.get(kind, ComposerConfig.model_fields[kind].default)
    with suppress(ConfigError):
        return find_one(name.partition("@")[0], kind).loss if isinstance(name, str) else None
    return None


def is_of(loss: Loss, option: str) -> bool:
    """Whether an option is a parameter of the loss, here or in another framework."""
    return option in loss.parameters or bool(what_to_set(loss, option))


def _chosen(framework: Framework, config: ComposerConfig, kind: Kind, framework_loss: str | None) -> Asked:
    """The losses of a config. Of an advantage nothing else is looked up."""
    if kind == "advantage":
        return Asked(config, config.choose_advantage(), None, None, None)
    hint = config.choose_hint() if config.hint_weight else None
    has_pairs = config.replay_weight and "preference" in framework.provides
    replay = config.choose_replay() if has_pairs else None
    policy = config.choose_policy(framework_loss) if config.policy != framework_loss else None
    return Asked(config, policy, config.choose_rollout_correction(), hint, replay)


def _findings(asked: Asked) -> Iterator[Finding]:
    """Yield an error for each option that does not fit the policy, and what is probably not meant."""
    config, policy = asked.config, asked.choice
    if config.old_policy is not None and not asked.needs_old:
        problem = f"policy {policy.name!r} takes no old_logprobs"
        yield Finding("error", "old_policy", problem, "remove it")
    clips = sorted(name for name in config.policy_params if name.startswith("clip_"))
    if config.old_policy == "current" and asked.needs_old and clips:
        problem = f"it is 'current', so the ratio of {policy.name!r} to the old policy is 1 at every token: "
        problem += f"{', '.join(clips)} cannot limit how far the policy moves"
        remedy = "set old_policy = 'rollout' for a ratio to the rollout engine, or policy = 'reinforce'"
        yield Finding("warning", "old_policy", problem, remedy)
    if asked.correction is not None and asked.has_rollout_ratio:
        problem = f"policy {policy.name!r} has the ratio of trainer to rollout already: it would count twice"
        yield Finding("error", "rollout_correction", problem, "remove it, or use policy = 'reinforce'")
    yield from scaled_hint(config, policy)
