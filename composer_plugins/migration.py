"""Move the loss of one framework's config into another's: what `composer-plugins migrate` prints.

Each adapter has a module `migration` with `read(table, version)`, which returns the `Objective` that its
framework trains, `write(objective)`, which returns a config of its framework, and `render(table)`, its text.
What the target cannot do is found by reading back what was written, so nobody keeps a list of differences.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple

from composer_plugins.catalogue import Choice
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ComposerError, ConfigError, in_a_line

MODULES = {
    "trl": "composer_plugins.adapters.trl_mixin.migration",
    "verl": "composer_plugins.adapters.verl_plugin.migration",
    "prime-rl": "composer_plugins.adapters.prime_rl_plugin.migration",
}
NORM = "seq-mean-token-sum-norm"  # the only mode with a constant
# Whose log-probabilities a policy loss is given: those that the trainer computed before the update, those of
# the rollout engine, or the policy's own, which makes the ratio 1.
Behaviour = Literal["trainer", "rollout engine", "policy itself"]


class KL(NamedTuple):
    """A KL penalty against the reference policy."""

    estimator: Choice
    weight: float
    place: Literal["loss", "reward"] = "loss"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one framework trains with one config, in the catalogue's terms."""

    policy: Choice
    mode: str  # the aggregation mode
    length: float | None = None  # the constant of NORM; None: the padded width
    old: Behaviour | None = None  # whose are its old_logprobs; None: it needs none
    rollout: Behaviour | None = None  # whose are its rollout_logprobs; None: it needs none
    advantage: Choice | None = None  # None: not one of the catalogue's; `remarks` says which
    group_size: int | None = None
    kl: KL | None = None
    correction: Choice | None = None
    entropy: float = 0.0  # the coefficient of the entropy bonus
    temperature: float = 1.0
    replay_temperature: float | None = None  # None: not known, as where pairs are scored elsewhere
    channels: Mapping[str, Any] = field(default_factory=dict)  # of `channels_of`
    # What a term is divided by, where the framework and not the loss decides it: "KL", "entropy bonus",
    # "hint_weight", "replay_weight". And which terms "policy_weight" multiplies.
    denominators: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # what the config asks for and no field holds
    to_correct: tuple[str, ...] = ()  # errors of the options, which the user has to correct
    unread: tuple[str, ...] = ()  # keys of the config that were not looked at, misspelt ones among them
    has_terms: bool = True  # False for a bare loss: the fields in NOT_OF_A_LOSS were not given

    def facts(self) -> dict[str, Any]:
        """Everything that decides the gradient, as names and values that can be compared."""
        found = dict(_facts("policy", self.policy)) | {"denominator": self.mode}
        if self.mode == NORM:
            found["denominator.max_length"] = self.length or "the padded width"
        found |= {"old_logprobs": self.old, "rollout_logprobs": self.rollout}
        found |= self._advantage_facts() | {"KL": None, "rollout correction": None}
        if self.kl is not None:
            found |= _facts("KL", self.kl.estimator)
            found |= {"KL.weight": self.kl.weight, "KL.place": self.kl.place}
        if self.correction is not None:
            found |= _facts("rollout correction", self.correction)
            if "log_weights" in self.policy.loss.optional:
                own = "log_weights" in self.policy.optional
                found["rollout correction.enters"] = "the loss's own weight" if own else "as a factor"
        found |= {"entropy bonus": self.entropy, "temperature": self.temperature, **self.channels}
        if self.channels.get("replay_weight"):
            found["replay_temperature"] = self.replay_temperature
        in_loss = self.kl is not None and self.kl.place == "loss"
        unless = {"KL": not in_loss, "policy_weight": not (in_loss or self.entropy)}
        for term, denominator in self.denominators.items():
            if found.get(term) and not unless.get(term):
                found[f"{term}.{'multiplies' if term == 'policy_weight' else 'denominator'}"] = denominator
        if self.group_size is not None:
            found["completions per prompt"] = self.group_size
        return found

    def _advantage_facts(self) -> dict[str, Any]:
        if self.advantage is None:
            return {"advantage": "not one of the catalogue's"}
        found = dict(_facts("advantage", self.advantage))
        if self.advantage.loss.name == "grpo" and found["advantage.scale"] == "none":
            found = {"advantage": "dr_grpo", "advantage.singleton": found["advantage.singleton"]}
        if self.group_size is not None and self.group_size > 1:
            found.pop("advantage.singleton", None)  # it says what a group of one gets
        return found


# What a bare loss does not say, so that it is not compared.
NOT_OF_A_LOSS = ("advantage", "KL", "rollout correction", "entropy bonus", "temperature")


class Difference(NamedTuple):
    """Something that the target's config does otherwise than the source's."""

    what: str
    source: str
    target: str

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.source} -> {self.target}" if self.target else f"{self.what}: {self.source}"
        )


class Migrated(NamedTuple):
    """A config of the target, and in what it differs from the source's."""

    text: str
    table: dict[str, Any]
    differences: tuple[Difference, ...]


def migrate(objective: Objective, target: str, version: str | None = None) -> Migrated:
    """A config of `target` for this objective, and everything in which the two differ.

    Raises ConfigError where the target cannot run the policy loss at all.
    """
    table = module(target).write(objective)
    written = read(target, table, version)
    if objective.group_size is None:
        written = replace(written, group_size=None)
    return Migrated(module(target).render(table), table, tuple(differences(objective, written)))


def read(framework: str, table: Mapping[str, Any], version: str | None = None) -> Objective:
    """What `framework` trains with a config that was read from its file."""
    adapter = module(framework)
    try:
        found: Objective = adapter.read(table, version)
    except ComposerError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a list where a number is read
        problem = f"a value has the wrong type, or {framework} refuses it: {in_a_line(error)}"
        raise ConfigError(f"the config of {framework}", problem, "correct the value") from None
    return found


def of_choice(chosen: Choice) -> Objective:
    """A policy loss of the catalogue alone, with its own denominator."""
    old, rollout = behaviours(chosen, "trainer", "rollout engine")
    return Objective(policy=chosen, mode=chosen.mode, old=old, rollout=rollout, has_terms=False)


def behaviours(
    policy: Choice, old: Behaviour, rollout: Behaviour
) -> tuple[Behaviour | None, Behaviour | None]:
    """Whose log-probabilities a loss is given as old_logprobs and rollout_logprobs, where it needs them."""
    needs = policy.loss.needs
    return (
        old if "old_logprobs" in needs else None,
        rollout if "rollout_logprobs" in needs else None,
    )


def differences(source: Objective, target: Objective) -> Iterator[Difference]:
    """Yield what `target` does otherwise than `source`, and what neither can express."""
    ours, theirs = source.facts(), target.facts()
    for what in dict.fromkeys((*ours, *theirs)):
        head = what.partition(".")[0]
        if (head in NOT_OF_A_LOSS and not source.has_terms) or ours.get(what) == theirs.get(what):
            continue
        if ours.get(head) == theirs.get(head):
            yield Difference(what, _shown(ours.get(what)), _shown(theirs.get(what)))
        elif what == head:  # another loss, with parameters of its own
            yield Difference(what, _described(what, ours), _described(what, theirs))
    for remark in dict.fromkeys((*source.remarks, *target.remarks)):
        yield Difference("not carried over", remark, "")
    for error in target.to_correct:
        yield Difference("to correct in this config", error, "")


def module(framework: str) -> Any:
    """The module `migration` of a framework's adapter."""
    try:
        return import_module(MODULES[framework])
    except ImportError as error:
        remedy = f"run this command where {framework} is installed"
        raise ConfigError(framework, f"{error.name} is not installed here", remedy) from None


def channels_of(config: ComposerConfig) -> dict[str, Any]:
    """The options of the hint and the replay that have a weight, unless at their default."""
    found: dict[str, Any] = {} if config.policy_weight == 1 else {"policy_weight": config.policy_weight}
    left_out = {"hint_params", "replay_temperature"}  # added below, and a field of Objective
    if config.hint_estimator != "advantage":
        left_out.add("hint_estimator")  # a parameter of the divergence
    for channel, loss, more in (
        ("hint", "hint_divergence", ("teacher_prompt_template",)),
        ("replay", "replay_loss", ()),
    ):
        if not getattr(config, f"{channel}_weight"):
            continue
        for name, option in ComposerConfig.model_fields.items():
            value = getattr(config, name)
            is_default = value == option.get_default(call_default_factory=True)
            of_channel = (name.startswith(f"{channel}_") or name in more) and name not in left_out
            if of_channel and (name == loss or not is_default):
                found[name] = value
    if config.hint_weight and (params := set_params(config.choose_hint())):
        found["hint_params"] = params
    return found


def named(option: str, choice: Choice) -> dict[str, Any]:
    """The options that name a choice: {"policy": "grpo@verl", "policy_params": {"clip_high": 0.28}}."""
    params = set_params(choice)
    return {option: choice.name} | ({f"{option}_params": params} if params else {})


def set_params(choice: Choice) -> dict[str, Any]:
    """The parameters of a choice that its name alone does not set."""
    fixed = dict(choice.loss.defaults) | dict(choice.dialect.params if choice.dialect else {})
    return {name: value for name, value in choice.params.items() if fixed[name] != value}


def _facts(what: str, choice: Choice) -> Iterator[tuple[str, Any]]:
    yield what, choice.loss.name
    for parameter in choice.loss.parameters:
        yield f"{what}.{parameter}", choice.value(parameter)


def _described(what: str, facts: Mapping[str, Any]) -> str:
    """A fact with those that belong to it: "k3 (weight 0.001, place loss)"."""
    start = f"{what}."
    more = [
        f"{name.removeprefix(start)} {_shown(value)}"
        for name, value in facts.items()
        if name.startswith(start) and value is not None
    ]
    return _shown(facts.get(what)) + (f" ({', '.join(more)})" if more else "")


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
