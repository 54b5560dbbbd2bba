"""`Objective`: what a run trains, in the catalogue's terms, whichever framework runs it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from composer_plugins.config import ComposerConfig
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import NORM as NORM

# What stands in place of a policy loss that the user has to choose. OmegaConf calls a value missing that is
# written in this way, and TRL's and PRIME-RL's configs reject it.
MISSING = "???"
# Whose log-probabilities a policy loss is given: the trainer's from before the update, the rollout
# engine's, or the policy's own, which makes the ratio 1.
Behaviour = Literal["trainer", "rollout engine", "policy itself"]


class KL(NamedTuple):
    """A KL penalty against the reference policy."""

    estimator: Choice
    weight: float
    place: Literal["loss", "reward"] = "loss"
    old: Behaviour = "trainer"  # whose are the old_logprobs of an estimator that needs them


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What one framework trains with one config, in the catalogue's terms."""

    policy: Choice  # STAND_IN, where `no_policy` says why no policy trains
    mode: str  # the aggregation mode; "" without a policy
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
    has_terms: bool = True  # False for a bare loss: the fields in NOT_OF_A_LOSS were not given
    no_policy: str = ""  # why this config trains no policy loss that could be written; "" if it trains one

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
            if "old_logprobs" in self.kl.estimator.loss.needs and self.kl.place == "loss":
                found["KL.old_logprobs"] = self.kl.old
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
        found = dict(_facts("advantage", as_dr_grpo(self.advantage)))
        if self.group_size is not None and self.group_size > 1:
            found.pop("advantage.singleton", None)  # it says what a group of one gets
        return found


STAND_IN = "reinforce"  # compared in place of a policy loss that is not there: every framework runs it


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
    return old if "old_logprobs" in needs else None, rollout if "rollout_logprobs" in needs else None


def as_dr_grpo(advantage: Choice) -> Choice:
    """Dr. GRPO's advantage for GRPO's without a scale, which it is; any other advantage unchanged."""
    if advantage.loss.name != "grpo" or advantage.value("scale") != "none":
        return advantage
    return choose("advantage", "dr_grpo", {"singleton": advantage.value("singleton")})


def as_mis(correction: Choice) -> Choice:
    """IcePop as the masked importance sampling that it is; any other correction unchanged.

    Weights are positive, so a lower bound of 0 does not bound them.
    """
    params = {**correction.loss.defaults, **correction.params}
    for bound in ("low", "floor"):
        params |= {bound: params[bound] or None} if bound in params else {}
    name = correction.loss.name
    if name == "icepop":
        name, params = "mis", params | {"level": "token"}
    return choose("correction", name, params) if name in ("mis", "tis") else correction


def channels_of(config: ComposerConfig) -> dict[str, Any]:
    """The options of the policy, and of a hint and a replay with a weight, unless at their default."""
    given = config.model_dump(exclude_defaults=True)
    found: dict[str, Any] = {
        name: x for name, x in given.items() if name in ("policy_weight", "on_bad_reward")
    }
    # hint_params are added below, and the temperature is a field of Objective.
    left_out = ["hint_params", "replay_temperature"]
    if config.hint_estimator != "advantage":
        left_out.append("hint_estimator")  # a parameter of the divergence
    channels = {"hint": ("hint_divergence", "teacher_prompt_template"), "replay": ("replay_loss",)}
    for channel, (loss, *more) in channels.items():
        if getattr(config, f"{channel}_weight"):
            of_channel = [one for one in ComposerConfig.model_fields if one.startswith(f"{channel}_")] + more
            shown = [one for one in of_channel if one == loss or one in given]
            found |= {one: getattr(config, one) for one in shown if one not in left_out}
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
    for name, parameter in choice.loss.parameters.items():
        value = choice.value(name)
        is_none = parameter.no_bound is not None and value is not None and value >= parameter.no_bound
        yield f"{what}.{name}", None if is_none else value
