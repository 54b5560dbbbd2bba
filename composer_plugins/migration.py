"""Move the loss of one framework's config into another's: what `composer-plugins migrate` prints.

Each adapter has a module `migration` with `read(table, version)`, which returns the `Objective` that its
framework trains, `write(objective, version)`, which returns a config of its framework, `render(table)`, its
text, and `release(version)`, the release whose options these are. KNOWN has names at the top of a config, by
which one of the framework is recognised.
What the target cannot do is found by reading back what was written, so nobody keeps a list of differences.

Each adapter has three tables of keys: those that it reads; those that bear on the loss and have no field in
`Objective`, each with the values that change nothing (NOT_CARRIED); and those that have no bearing on the
loss (NO_BEARING). Any other key is not understood, and may bear on the loss: see `not_understood`.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple

from composer_plugins.config import ComposerConfig, at
from composer_plugins.errors import ComposerError, ConfigError, in_a_line, near
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import Parameter

MODULES = {
    "trl": "composer_plugins.adapters.trl_mixin.migration",
    "verl": "composer_plugins.adapters.verl_plugin.migration",
    "prime-rl": "composer_plugins.adapters.prime_rl_plugin.migration",
}
# Configs of other schemas, by keys at the top that no config of the named framework lacks. A file with such a
# key is not read as one of another framework.
SCHEMAS = {
    "verl": ("actor_rollout_ref",),
    "prime-rl": ("orchestrator",),
    "Axolotl": ("base_model", "rl", "trl"),
    "EasyR1": ("worker",),
    "LLaMA-Factory": ("finetuning_type", "stage"),
    "ms-swift": ("rlhf_type",),
    "NeMo-RL": ("loss_fn",),
    "SkyRL": ("generator",),
    "AReaL": ("gconfig", "allocation_mode"),
    "ROLL": ("actor_train", "actor_infer"),
    "Trinity-RFT": ("explorer", "synchronizer"),
}
# What stands in place of a policy loss that the user has to choose. OmegaConf calls a value missing that is
# written in this way, and TRL's and PRIME-RL's configs reject it.
MISSING = "???"
NORM = "seq-mean-token-sum-norm"  # the only mode with a constant
NOT_CARRIED_OVER, TO_CORRECT = "not carried over", "to correct in this config"
# The numbers among a framework's options: each is checked, and the error is worded, as a parameter of ours.
NUMBER, WEIGHT = Parameter("of either sign"), Parameter("of a term", low=0)
POSITIVE = Parameter("a temperature", low=math.ulp(0.0))
COUNT = Parameter("of completions or tokens", low=1, integer=True)
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

    policy: Choice  # STAND_IN, where `no_policy` says why there is none
    mode: str  # the aggregation mode; "" where there is no policy
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
    unread: tuple[str, ...] = ()  # keys of the config that are not understood: `not_understood`
    has_terms: bool = True  # False for a bare loss: the fields in NOT_OF_A_LOSS were not given
    no_policy: str = ""  # why this config trains no policy loss that could be written; "" if it trains one
    read_as: str = ""  # the release whose options were read, in words; "" for a bare loss

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
            found |= _facts("rollout correction", as_mis(self.correction))
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
NOT_OF_A_LOSS = {"advantage", "KL", "rollout correction", "entropy bonus", "temperature"}
NOT_OF_A_LOSS |= {"denominator.max_length"}
# What a policy loss decides, so that it is not compared where there is none.
OF_A_POLICY = {"policy", "denominator", "old_logprobs", "rollout_logprobs"}
STAND_IN = "reinforce"  # compared in place of a policy loss that is not there: every framework runs it


class Effect(NamedTuple):
    """What it means that a property differs, and what the user can set."""

    meaning: str
    remedy: str = ""
    # The values that act only where numbers are extreme, or as little as rounding; None: there are none.
    small: tuple[float, float] | None = None

    def is_small(self, *values: Any) -> bool:
        """Whether both values of the property are among those that act on extreme numbers only."""
        return self.small is not None and all(
            value is None or self.small[0] <= value <= self.small[1] for value in values
        )


CONSTANT = "Adam ignores a constant factor of the whole loss; for one term of several, change its weight."
# By property, the most important first. The key is a whole name, the last part of one, the first part, or
# the word with which it begins: `effect_of`.
EFFECTS: dict[str, Effect] = {
    TO_CORRECT: Effect("The written config does not run before this is corrected."),
    "policy": Effect("Every token has another loss."),
    "advantage": Effect("Rewards become advantages by another rule, so each completion has another weight."),
    "scale": Effect("The standard deviation that divides the advantages is another one, or there is none."),
    "singleton": Effect(
        "A prompt with a single completion gets another advantage.", "Sample at least two per prompt."
    ),
    "policy_weight": Effect("The policy loss weighs more or less against the other terms."),
    "multiplies": Effect("The weight multiplies other terms of the loss."),
    "KL": Effect("The penalty that keeps the policy near the reference policy is another one, or none."),
    "hint": Effect("The hint's term of the loss is another one, or its teacher is."),
    "teacher_prompt_template": Effect("The hint's teacher gets another prompt."),
    "replay": Effect("The loss of the replayed pairs is another one, or there is none."),
    "replay_temperature": Effect(
        "The pairs are compared at another temperature, which scales their margins."
    ),
    "entropy bonus": Effect("The term that keeps the entropy up has another coefficient, or there is none."),
    "rollout correction": Effect(
        "What makes up for the gap between trainer and rollout engine is different."
    ),
    "enters": Effect("The weight of the correction enters the loss in another place."),
    NOT_CARRIED_OVER: Effect(
        "Only one of the two configs does this.", "Set it by hand, if the target has it."
    ),
    "temperature": Effect("Sampling, and the log-probabilities of the loss, have another temperature."),
    "completions per prompt": Effect(
        "A prompt's baseline comes from another number of rewards.", "Set it in the written config."
    ),
    "ddof": Effect("All advantages change by a constant factor, sqrt(n / (n - 1)) for n completions."),
    "denominator": Effect(
        "The sum is divided by another number, so the weight of each token in its completion or batch "
        "changes.",
        CONSTANT,
    ),
    "max_length": Effect("The whole policy loss changes by a constant factor.", CONSTANT),
    "old_logprobs": Effect(
        "The ratio compares the policy with other log-probabilities, and is another number at every token."
    ),
    "rollout_logprobs": Effect("The loss compares the policy with the log-probabilities of another engine."),
    "eps": Effect("It matters only where all rewards of a prompt are nearly equal.", small=(0.0, 1e-3)),
    "log_ratio_clamp": Effect(
        "It matters only at tokens whose log ratio is beyond it.", small=(10.0, math.inf)
    ),
    "value_clamp": Effect("It matters only at tokens whose penalty is beyond it.", small=(5.0, math.inf)),
}


def effect_of(what: str) -> str:
    """The key in EFFECTS of a property: "denominator" for "KL.denominator"."""
    head, _, last = what.partition(".")
    return next(key for key in (what, last, head, head.partition("_")[0]) if key in EFFECTS)


class Difference(NamedTuple):
    """Something that the target's config does otherwise than the source's."""

    what: str
    source: str
    target: str
    is_small: bool = False  # both values act on extreme numbers only

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
    table = module(target).write(objective, version)
    compared = module(target).write(replace(objective, no_policy=""), version)
    written = read(target, compared, version)
    if objective.group_size is None:
        written = replace(written, group_size=None)
    return Migrated(module(target).render(table), table, tuple(differences(objective, written)))


def read(framework: str, table: Mapping[str, Any], version: str | None = None) -> Objective:
    """What `framework` trains with a config that was read from its file."""
    check_schema(framework, table)
    adapter = module(framework)
    if table and not any(near(str(key).partition(".")[0], adapter.KNOWN) for key in table):
        problem = f"the config has none of {framework}'s tables or options, but {', '.join(map(str, table))}"
        raise ConfigError("--from", problem, "name the framework that the config is for")
    try:
        found: Objective = adapter.read(table, version)
    except ComposerError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # a list where a number is read
        problem = f"a value has the wrong type, or {framework} refuses it: {in_a_line(error)}"
        raise ConfigError(f"the config of {framework}", problem, "correct the value") from None
    return found


def check_schema(framework: str, table: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config of another schema than this framework's."""
    if any(key in table for key in SCHEMAS.get(framework, ())):
        return
    for owner, marks in SCHEMAS.items():
        if owner != framework and (found := [key for key in marks if key in table]):
            verb = "stands" if len(found) == 1 else "stand"
            problem = f"the config is one of {owner}: {', '.join(found)} {verb} at its top"
            remedy = (
                f"set --from {owner}" if owner in MODULES else f"write the loss with {framework}'s options"
            )
            raise ConfigError("--from", problem, remedy)


def not_understood(config: Mapping[str, Any], known: Collection[str], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a config that `known` does not have. A known key covers everything below it.

    A key in a list of tables has no number. A table is one key if nothing in it is known.
    """
    for name, value in config.items():
        key = f"{above}{name}"
        if key in known:
            continue
        inner = value if isinstance(value, list) else [value]
        is_a_table = all(one is None or isinstance(one, Mapping) for one in inner)
        if is_a_table and any(one.startswith(f"{key}.") for one in known):
            for one in inner:
                yield from not_understood(one or {}, known, f"{key}.")
        elif value != {}:
            yield key


def not_carried(config: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield "key = value" for each key of `neutral` with another value than those, which change nothing."""
    for key, values in neutral.items():
        if (found := at(config, key)) not in values:
            yield f"{key} = {found!r}"


def check_flag(key: str, value: Any) -> None:
    """Raise ConfigError unless an option is true or false; the text "False" counts as true in Python."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"it is {value!r}", "set true or false")


def check_tables(config: Mapping[str, Any], *paths: str) -> None:
    """Raise ConfigError where another value stands in the place of a table; `paths` are dotted."""
    for path in paths:
        found = at(config, path)
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(path, f"it is {found!r}", "write a table of options")


def without_policy(why: str, **fields: Any) -> Objective:
    """What a config trains that has no policy loss, with the reason."""
    policy = choose("policy", STAND_IN)
    return Objective(policy=policy, mode="", no_policy=why, **fields)


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
    skipped = (set() if source.has_terms else NOT_OF_A_LOSS) | (OF_A_POLICY if source.no_policy else set())
    if source.no_policy:
        yield Difference("policy", f"none, because {source.no_policy}", f"{MISSING}, for you to choose")
    for what in dict.fromkeys((*ours, *theirs)):
        head, values = what.partition(".")[0], (ours.get(what), theirs.get(what))
        if values[0] == values[1] or {what, head} & skipped:
            continue
        if ours.get(head) == theirs.get(head):
            is_small = EFFECTS[effect_of(what)].is_small(*values)
            yield Difference(what, _shown(values[0]), _shown(values[1]), is_small)
        elif what == head:  # another loss, with parameters of its own
            yield Difference(what, _described(what, ours), _described(what, theirs))
    for remark in dict.fromkeys((*source.remarks, *target.remarks)):
        if remark not in source.remarks or remark not in target.remarks:
            yield Difference(NOT_CARRIED_OVER, remark, "")
    for error in target.to_correct:
        yield Difference(TO_CORRECT, error, "")


def module(framework: str) -> Any:
    """The module `migration` of a framework's adapter."""
    try:
        return import_module(MODULES[framework])
    except ImportError as error:
        remedy = f"run this command where {framework} is installed"
        raise ConfigError(framework, f"{error.name} is not installed here", remedy) from None


def as_mis(correction: Choice) -> Choice:
    """IcePop as the masked importance sampling that it is; any other correction unchanged.

    Weights are positive, so a lower bound of 0 is none.
    """
    params = {**correction.loss.defaults, **correction.params}
    for bound in ("low", "floor"):
        params |= {bound: params[bound] or None} if bound in params else {}
    name = correction.loss.name
    if name == "icepop":
        name, params = "mis", params | {"level": "token"}
    return choose("correction", name, params) if name in ("mis", "tis") else correction


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
    if None in params.values():  # which TOML cannot write; it is the default without a dialect
        choice = replace(choice, upstream="")
        params = set_params(choice)
    return {option: choice.name} | ({f"{option}_params": params} if params else {})


def named_policy(objective: Objective) -> dict[str, Any]:
    """The options that name the policy loss; MISSING in place of one that the user has to choose."""
    return {"policy": MISSING} if objective.no_policy else named("policy", objective.policy)


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
    return "none" if value is None else str(value).removesuffix(".0" if isinstance(value, float) else "")
