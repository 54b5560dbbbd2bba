"""`ComposerConfig`: the config model into which the options of TRL, PRIME-RL and verl are parsed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from string import Formatter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from composer_plugins.errors import ConfigError, Finding, Findings, Severity, enforce, near, unknown
from composer_plugins.losses import choosing
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, Loss, of_kind

WEIGHTS = ("policy_weight", "hint_weight", "replay_weight")  # of the channels
# Options that only our estimators read.
ADVANTAGE_OPTIONS = ("advantage", "advantage_params", "on_bad_reward")


class ComposerConfig(BaseModel):
    """The options of policy_weight * policy + hint_weight * hint + replay_weight * replay."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)  # "0.1" and true are not numbers

    advantage: str = "grpo"  # verl only: the other frameworks compute the advantages
    advantage_params: dict[str, Any] = Field(default_factory=dict)

    # A reward that is not a finite number: an error, 0, or the completion is left out of its group.
    on_bad_reward: Literal["error", "drop", "zero"] = "error"

    policy: str = "grpo"
    policy_params: dict[str, Any] = Field(default_factory=dict)
    policy_weight: float = Field(1.0, ge=0, allow_inf_nan=False)
    # PRIME-RL has no `old_logprobs`. This says whose log-probabilities are used in their place.
    old_policy: Literal["rollout", "current"] | None = None
    rollout_correction: str | None = None  # tis, mis, icepop
    rollout_correction_params: dict[str, Any] = Field(default_factory=dict)

    hint_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    hint_divergence: str = "jsd"
    hint_params: dict[str, Any] = Field(default_factory=dict)
    # Of a sampled-token divergence: its estimator; "advantage" makes the hint part of the advantages.
    hint_estimator: Literal["score", "k2", "k3", "advantage"] | None = None
    hint_teacher: Literal["base", "ema", "live"] = "base"
    hint_ema_rate: float = Field(0.05, gt=0, le=1, allow_inf_nan=False)
    # verl sends this many entries of the teacher's distributions between processes.
    hint_top_k: int | None = Field(None, ge=1)
    # TAID's t at the first step; it grows to the t of hint_params. None: t is constant.
    hint_t_start: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    teacher_prompt_template: str = "{prompt}\n\n{privileged_context}"

    replay_weight: float = Field(0.0, ge=0, allow_inf_nan=False)
    replay_loss: str = "dpo"
    replay_params: dict[str, Any] = Field(default_factory=dict)
    replay_temperature: float = Field(1.0, gt=0, allow_inf_nan=False)

    health: bool = True  # whether the state of the run is measured from its batches, and warned of
    record_batches: str | None = None  # a folder, into which each micro-batch is written: see `compare`
    record_every: int = Field(1, ge=1)  # of so many steps, one is recorded

    _chosen: dict[str, Choice] = PrivateAttr(default_factory=dict)  # what was looked up already

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Any],
        *,
        framework_loss: str | None = None,
        unavailable: Collection[str] = (),
    ) -> "ComposerConfig":
        """`values` as a config; one ConfigError if anything is wrong, with all that is wrong in `others`.

        `framework_loss` is the value of `policy` by which a framework keeps its own RL term ("trl"), and
        `unavailable` are options that a framework does not have.
        """
        wrong, bad = Findings(), set[str]()
        try:
            config = cls.model_validate(dict(values))
        except ValidationError as error:
            policy = values.get("policy", cls.model_fields["policy"].default)
            known = [name for name in cls.model_fields if name not in unavailable]
            wrong += complaints(error, known, policy)
            bad = {str(one["loc"][0]) for one in error.errors()}
            config = cls.model_validate({name: x for name, x in values.items() if str(name) not in bad})
            bad |= {name for one in bad for name in near(one, cls.model_fields)}
        for prefixes, check in config._checks(framework_loss, unavailable):
            given = [name for name in values if str(name).startswith(prefixes)]
            if given and not [name for name in bad if name.startswith(prefixes)]:
                with wrong.collected():
                    check()
        enforce(wrong)
        return config

    def _checks(
        self, framework_loss: str | None, unavailable: Collection[str]
    ) -> list[tuple[tuple[str, ...], Callable[[], object]]]:
        """What must hold, apart from the options' types, with the prefixes of the options it looks at."""
        return [
            (("",), lambda: self._check_weights(unavailable)),
            (("policy",), lambda: self._check_policy(framework_loss)),
            (("advantage",), self.choose_advantage),
            (("rollout_correction",), self.choose_rollout_correction),
            (("hint_divergence", "hint_params", "hint_estimator"), self.choose_hint),
            (("replay_loss", "replay_params"), self.choose_replay),
            (("hint", "policy"), lambda: _check_hint_as_advantage(self, framework_loss)),
            (("hint",), lambda: _check_t_start(self)),
            (("teacher",), self._check_teacher_prompt_template),
        ]

    def _check_weights(self, unavailable: Collection[str]) -> None:
        if not any(getattr(self, one) for one in WEIGHTS):
            weights = [one for one in WEIGHTS if one not in unavailable]
            problem = f"it is 0{', and so are the other weights' if weights[1:] else ''}: nothing trains"
            raise ConfigError("policy_weight", problem, f"set {' or '.join(weights)} to a number above 0")

    def _check_teacher_prompt_template(self) -> None:
        key, template = "teacher_prompt_template", self.teacher_prompt_template
        check_template(key, template, {"privileged_context"}, {"prompt"})

    def _check_policy(self, framework_loss: str | None) -> None:
        if self.policy != framework_loss:
            chosen = self.choose_policy(framework_loss)
            is_nothing = chosen.value("adv_tau") == chosen.value("kl_tau") == 0
            if is_nothing and self.policy_weight and not chosen.is_third_party:
                problem = f"it is 0, and so is kl_tau: {self.policy!r} trains nothing"
                raise ConfigError("policy_params.adv_tau", problem, "set one of them, or policy_weight to 0")
        elif self.policy_params:
            given = ", ".join(sorted(self.policy_params))
            problem = f"policy={framework_loss!r} is the framework's own loss, and {given} would not reach it"
            raise ConfigError("policy_params", problem, "name a policy, or set the framework's own options")

    def choose_policy(self, framework_loss: str | None = None) -> Choice:
        """The policy loss, which may be a dialect ("cispo@trl"), with its parameters checked."""
        others = (framework_loss,) if framework_loss else ()
        return self._choose("policy", self.policy, self.policy_params, "policy", others)

    def choose_advantage(self) -> Choice:
        """The advantage estimator, which may be a dialect ("grpo@verl")."""
        return self._choose("advantage", self.advantage, self.advantage_params, "advantage")

    def choose_rollout_correction(self) -> Choice | None:
        """The weight for the gap between trainer and rollout engine; None: none."""
        name, params = self.rollout_correction, self.rollout_correction_params
        if name is not None:
            chosen = self._choose("correction", name, params, "rollout_correction")
            _check_bounds(chosen)
            return chosen
        if params:
            problem = "they are set, and rollout_correction is not"
            raise ConfigError("rollout_correction_params", problem, "set rollout_correction, or remove them")
        return None

    def choose_hint(self) -> Choice:
        """The hint channel's divergence."""
        params = dict(self.hint_params)
        if self.hint_estimator == "advantage" and params:
            problem = "they are parameters of a divergence, and hint_estimator='advantage' computes none"
            raise ConfigError("hint_params", problem, "remove them")
        if self.hint_estimator is not None and "estimator" in params:
            problem = "hint_params.estimator is set too, and they are one option"
            raise ConfigError("hint_estimator", problem, "set one of them")
        if self.hint_estimator not in (None, "advantage"):
            params["estimator"] = self.hint_estimator
        try:
            return self._choose("divergence", self.hint_divergence, params, "hint_divergence")
        except ConfigError as error:
            if self.hint_estimator is None or error.key != "hint_params.estimator":
                raise
            problem = f"it is {self.hint_estimator!r}, and {self.hint_divergence!r} has no estimator"
            remedy = "set hint_divergence to 'sampled_token', or remove it"
            raise ConfigError("hint_estimator", problem, remedy) from None

    def choose_replay(self) -> Choice:
        """The replay channel's preference loss."""
        return self._choose("preference", self.replay_loss, self.replay_params, "replay_loss")

    def _choose(
        self, kind: Kind, name: str, params: Mapping[str, Any], option: str, also_accepted: Iterable[str] = ()
    ) -> Choice:
        """The loss of an option, which is looked up once for the same name and parameters."""
        key = f"{option} {name} {params}"
        if key not in self._chosen:
            self._chosen[key] = choosing.choose(
                kind, name, params, option=option, also_accepted=also_accepted, what_to_set=what_to_set
            )
        return self._chosen[key]

    def without_effect(self, given: Collection[str], severity: Severity = "error") -> Iterator[Finding]:
        """Yield a finding for each channel with options that are `given` and have no effect.

        A weight that is given as 0 switches the channel off, and its options may stay.
        """
        if "hint_ema_rate" in given and self.hint_teacher != "ema":
            problem = f"it has no effect, because hint_teacher is {self.hint_teacher!r}"
            yield Finding(severity, "hint_ema_rate", problem, "set hint_teacher to 'ema', or remove it")
        computed = self.hint_divergence if "hint_divergence" in given else "sampled_token"
        if self.hint_estimator == "advantage" and computed != "sampled_token":
            problem = "it has no effect, because hint_estimator is 'advantage', which computes no divergence"
            yield Finding(severity, "hint_divergence", problem, "remove it, or set another hint_estimator")
        for channel, more in (("hint", "teacher_prompt_template"), ("replay", "")):
            weight = f"{channel}_weight"
            options = [name for name in given if name.startswith(f"{channel}_") or name == more]
            if options and weight not in given:
                problem = f"it has no effect, because {weight} is 0"
                yield Finding(severity, min(options), problem, f"set {weight}, or remove it")


def complaints(error: ValidationError, known: Collection[str], policy: object = None) -> list[Finding]:
    """Pydantic's complaints about options, of which these are known, as findings."""
    return [Finding.from_error(_error(one, known, policy)) for one in error.errors()]


def unknown_option(name: str, known: Iterable[str], policy: object) -> ConfigError:
    """The error for an option that does not exist. It may be a parameter of `policy`, the policy by name."""
    row = of_kind(losses(), "policy").get(str(policy).partition("@")[0])
    if row is not None:
        own = f"set {name} in policy_params" if name in row.parameters else ""
        if remedy := own or what_to_set(row, name, " in policy_params"):
            return ConfigError(name, f"it is a parameter of policy {row.name!r}", remedy)
    return unknown(name, name, known, noun="option", completes=False)


def what_to_set(loss: Loss, name: str, where: str = "") -> str:
    """The remedy for an option that some framework has for a parameter of this loss; "" if none has."""
    from composer_plugins.frameworks import registry  # loads the table of every framework

    return registry.what_to_set(loss, name, where)


def unlikely(choice: Choice) -> Iterator[Finding]:
    """Yield a warning for a parameter with a value that hardly anyone intends; of several, for the last.

    Bounds of which the lower one is above the upper one are an error.
    """

    def key(name: str) -> str:
        return f"{choice.params_option}.{name}"

    found = [
        (name, value, one)
        for name, parameter in choice.loss.parameters.items()
        for one in parameter.unlikely
        if (value := choice.value(name)) is not None and one.above < value < one.below
    ]
    low, high = choice.value("clip_low"), choice.value("clip_high")
    if low is not None and high is not None and low + high < 0:
        problem = f"clip_low={low:g} is a lower bound of {1 - low:g}, which is above the upper one, so every "
        problem += f"weight is {1 + high:g}"
        yield Finding("error", key("clip_low"), problem, f"set clip_low to at least {-high:g}, or clip_high")
        return
    for name, value, one in found[-1:]:
        words = {"ratio": 1 + value, "percent": value / 100}
        problem = f"{name}={value:g} {one.effect.format(**words)}"
        yield Finding("warning", key(name), problem, one.remedy.format(**words))


def scaled_hint(config: ComposerConfig, policy: Choice) -> Iterator[Finding]:
    """Yield a finding where the policy multiplies the advantages, and with them a hint that is in them."""
    scale, weight = policy.value("adv_tau"), config.hint_weight
    is_in_advantages = config.hint_estimator == "advantage" and weight
    if not is_in_advantages or scale in (None, 1) or policy.is_third_party:
        return
    if scale == 0:
        problem = "it is 0 and multiplies the advantages, to which 'advantage' adds the hint: no hint trains"
        remedy = "set another number, or policy_weight = 0 and hint_estimator = 'score' for the hint alone"
        yield Finding("error", "policy_params.adv_tau", problem, remedy)
        return
    problem = f"it is {weight:g}, and adv_tau={scale:g} multiplies the advantages with the hint in them, "
    problem += f"so the hint has the weight {weight * scale:g}"
    remedy = f"leave it, or set {weight / scale:g} for a hint with the weight {weight:g}"
    yield Finding("warning", "hint_weight", problem, remedy)


def _error(complaint: Mapping[str, Any], known: Collection[str], policy: object) -> ConfigError:
    key = ".".join(map(str, complaint["loc"]))
    if complaint["type"] == "extra_forbidden":
        return unknown_option(key, known, policy)
    if complaint["type"] == "literal_error":
        choices = [c.strip("'") for c in complaint["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return unknown(key, str(complaint["input"]), choices, noun="value")
    wanted = complaint["msg"].replace("Input should be ", "set a number " if "ctx" in complaint else "set ")
    return ConfigError(key, f"it is {complaint['input']!r}", wanted)


def _check_bounds(correction: Choice) -> None:
    """Raise ConfigError for a lower bound above its upper one; each alone may be in its range."""
    for lower, upper in (("low", "high"), ("floor", "cap")):
        low, high = correction.value(lower), correction.value(upper)
        if low is not None and high is not None and low > high:
            problem = f"{low:g} is above {upper}, {high:g}, so no weight is between them"
            raise ConfigError(f"rollout_correction_params.{lower}", problem, f"set it to at most {high:g}")


def _check_hint_as_advantage(config: ComposerConfig, framework_loss: str | None) -> None:
    """Raise ConfigError for a hint that is added to advantages which nothing uses."""
    if config.hint_estimator != "advantage" or not config.hint_weight:
        return
    if not config.policy_weight:
        problem = "'advantage' adds the hint to the advantages, and policy_weight is 0"
        raise ConfigError("hint_estimator", problem, "set policy_weight, or another hint_estimator")
    policy = None if config.policy == framework_loss else config.choose_policy(framework_loss)
    if policy is not None and "advantages" not in (*policy.loss.needs, *policy.optional):
        problem = f"'advantage' adds the hint to the advantages, and {config.policy!r} takes none"
        raise ConfigError("hint_estimator", problem, "choose another policy, or another hint_estimator")
    if policy is not None and policy.loss.per_sequence:
        problem = f"'advantage' gives each token its own advantage, and {config.policy!r} averages them"
        raise ConfigError("hint_estimator", problem, "set 'score', or a policy per token (gspo_token)")


def _check_t_start(config: ComposerConfig) -> None:
    """Raise ConfigError for a start of t where the divergence has no t, and for one above its end."""
    if config.hint_t_start is None:
        return
    hint = config.choose_hint()
    if "t" not in hint.params:
        problem = f"only TAID has a t, and hint_divergence is {hint.name!r}"
        raise ConfigError("hint_t_start", problem, "remove it")
    if config.hint_t_start > hint.params["t"]:
        problem = f"{config.hint_t_start:g} is above hint_params.t, {hint.params['t']:g}, and t only grows"
        raise ConfigError("hint_t_start", problem, f"set it to at most {hint.params['t']:g}")


def at(tree: Any, path: str) -> Any:
    """The entry at a dotted path of a config, a DictConfig or a mapping, or None."""
    for key in path.split("."):
        tree = tree.get(key) if hasattr(tree, "get") else None
    return tree


ABSENT = object()  # of a key that a config does not have


def entry(tree: Any, path: str) -> Any:
    """The entry at a dotted path of nested mappings, which may be null; ABSENT without an entry."""
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def check_template(key: str, template: str, needed: set[str], optional: Set[str] = frozenset()) -> None:
    """Raise ConfigError unless `template` has the fields `needed`, and no others but the `optional` ones."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        template.format_map(dict.fromkeys(names, "x"))
    except (ValueError, KeyError) as error:
        problem = f"{template!r} is not a template: {error}"
        raise ConfigError(key, problem, "write {{ for a brace") from None
    if not needed <= names <= needed | optional:
        problem = f"{template!r} has the fields {sorted(names)}"
        remedy = "write " + " and ".join(f"{{{name}}}" for name in sorted(needed))
        if optional:
            remedy += ", and if you like " + " and ".join(f"{{{name}}}" for name in sorted(optional))
        raise ConfigError(key, problem, remedy)
