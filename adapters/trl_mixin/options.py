"""`ComposerGRPOConfig`: TRL's GRPOConfig with the three channels; a parser that finds misspelt options."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pydantic import ValidationError
from transformers import Trainer
from trl import GRPOConfig, TrlParser

from composer_plugins import config
from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.hints import (
    EnvironmentHints,
    HintColumn,
    HintSource,
    RolloutOptions,
    SuccessfulRollouts,
)
from composer_plugins.config import ComposerConfig, complaints
from composer_plugins.errors import ConfigError, Finding, Findings, enforce, error_of, unknown
from composer_plugins.frameworks.trl import MODES, MODES_IN_WORDS, TRL, VLLM_WEIGHTS
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.asking import ask

TRL_LOSS = "trl"  # the value of `policy` that keeps TRL's own policy loss
PARAMS = ("policy_params", "hint_params", "replay_params")
HINT_SOURCES = ("column", "environment", "successful_rollout")


def unknown_option(name: str, known: Iterable[str], given: Mapping[str, Any]) -> ConfigError:
    """The error for an option that does not exist; `given` are the other options."""
    if name in TRL.unavailable:
        why, remedy = TRL.unavailable[name]
        return ConfigError(name, f"it is not available here, because {why}", remedy)
    return config.unknown_option(name, known, given.get("policy"))


def option(default: Any, help: str) -> Any:
    """A dataclass field with the help text that TRL's parser shows."""
    return field(default=default, metadata={"help": help})


class Resolved(NamedTuple):
    """What a config asks for: the options of the channels, and each loss, looked up once."""

    composer: ComposerConfig
    policy: Choice | None  # None with policy="trl"
    mode: str  # how our policy loss is reduced, a key of `MODES_IN_WORDS`
    mode_source: str  # what decided so
    hint: Choice | None
    replay: Choice | None
    hints: HintSource  # where hints come from
    findings: tuple[Finding, ...]  # what is probably not meant


@dataclass
class ComposerGRPOConfig(GRPOConfig):
    """GRPOConfig, and the options of the three channels of the composer loss.

    With its defaults the loss is TRL's own, bit for bit. The config is checked when it is made: unknown
    names and keys, parameters out of range, and combinations that do not work in TRL are a ConfigError.
    """

    policy: str = option(
        TRL_LOSS,
        "Policy loss. 'trl' keeps TRL's own, bit for bit. A name (gspo) is the loss of that paper. A dialect "
        "(cispo@trl) is the loss as that framework computes it. An import path (my_package.losses:my_loss) "
        "is a function of yours. Its parameters are policy_params alone: TRL's epsilon and the like are not "
        "read.",
    )
    loss_type: str | None = option(
        None,
        "With policy='trl', TRL's loss_type. With our policies it chooses only the denominator: grpo, "
        "bnpo, dr_grpo, dapo or luspo. Not set, the default: TRL's own default with policy='trl', and "
        "otherwise the denominator of the loss's paper, or of the upstream whose dialect is named.",
    )
    policy_params: dict[str, Any] | str | None = option(
        None, "Parameters of the policy loss, as a dict or as JSON, e.g. {'clip_high': 0.28}."
    )
    policy_weight: float = option(
        1.0,
        "Weight of the policy loss together with TRL's KL, entropy bonus and auxiliary loss of MoE models.",
    )
    on_bad_reward: str = option(
        "error",
        "What becomes of a reward that is NaN or infinite. 'error': the run ends, with the row. 'zero': the "
        "reward is 0. 'drop' (TRL 1.16): the completion is left out of the mean and the deviation of its "
        "group and has advantage 0. The last two warn once and log composer/bad_reward_frac.",
    )
    hint_weight: float = option(0.0, "Weight of hint self-distillation; 0 switches it off.")
    hint_divergence: str = option(
        "jsd",
        "Divergence from the teacher to the policy: jsd, forward_kl, sampled_token ..., or an import path.",
    )
    hint_params: dict[str, Any] | str | None = option(
        None,
        "Parameters of the divergence, as a dict or as JSON, e.g. {'beta': 0.5}. With {'top_k': 100, 'rest': "
        "'tail'} jsd compares the teacher's 100 most probable tokens and the probability of all others.",
    )
    hint_teacher: str = option(
        "base",
        "Who sees the hint. 'base': the weights that the trainer was constructed with, frozen (to resume, "
        "construct the trainer with the original model, not with the checkpoint). 'ema': a moving average of "
        "the policy. 'live': the policy itself, which collapsed in every measured run.",
    )
    hint_ema_rate: float = option(
        0.05,
        "After each optimizer step, ema teacher += hint_ema_rate * (policy - ema teacher). 0.05 is SDPO's "
        "rate. At the codebook recipe's learning rate of 1e-3 it collapsed, and 0.002 learned.",
    )
    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "The teacher's prompt with hint_source='column' or 'environment'. In a conversation it is filled "
        "into the last user message, and {prompt} is the text of that message.",
    )
    hint_source: str = option(
        "column",
        "Where hints come from. 'column': the column privileged_context. 'environment': the attribute "
        "privileged_context of each rollout's environment, after the rollout. 'successful_rollout': the "
        "first completion of the prompt's group with a reward of success_reward_threshold, as in TRL's SDPO. "
        "A row without such a completion has no hint.",
    )
    success_reward_threshold: float = option(
        1.0, "The least reward of a successful rollout: the weighted sum of the reward functions."
    )
    dont_reprompt_on_self_success: bool = option(
        True, "A successful rollout is not a hint for itself, only for the others of its group."
    )
    reprompt_template: str = option(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "The teacher's prompt with hint_source='successful_rollout', filled in like teacher_prompt_template.",
    )
    solution_template: str = option(
        "\nCorrect solution:\n\n{successful_previous_attempt}\n\n",
        "The {solution} of reprompt_template; empty in a row without a successful rollout.",
    )
    feedback_template: str = option(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n",
        "The {feedback} of reprompt_template; empty in a row without feedback.",
    )
    include_environment_feedback: bool = option(
        False,
        "With hint_source='successful_rollout', show the teacher the column privileged_context as feedback, "
        "which a rollout_func may return for each completion. A row with feedback alone has a hint too.",
    )
    environment_feedback_only_without_solution: bool = option(
        False, "Show the feedback only in rows without a successful rollout."
    )
    remove_thinking_from_demonstration: bool = option(
        False, "Remove <think>...</think> from the successful rollout before the teacher sees it."
    )
    max_reprompt_len: int = option(
        10240,
        "With hint_source='successful_rollout' only this many tokens of the teacher's prompt are kept, the "
        "last ones.",
    )
    replay_weight: float = option(0.0, "Weight of replayed pairs; 0 switches them off.")
    replay_loss: str = option("dpo", "Preference loss: dpo, simpo, ipo ..., or an import path.")
    replay_params: dict[str, Any] | str | None = option(
        None, "Parameters of the preference loss, as a dict or as JSON, e.g. {'beta': 0.1}."
    )
    replay_temperature: float = option(
        1.0,
        "The logits of replayed pairs are divided by it. 1.0 is DPO as in its paper and in TRL's DPOTrainer. "
        "Set it to `temperature` to compare the distributions that completions are sampled from.",
    )
    fused_linear: bool = option(
        True,
        "Compute the hint and replay losses from the hidden states in front of the output head, a few tokens "
        "at a time, without a tensor of logits. False: from the model's logits, which needs more memory.",
    )

    health: bool = option(
        True,
        "Measure the state of the run from the tensors of each batch: log composer/health/* and warn where "
        "they show a fault, once each. False: nothing is measured.",
    )
    record_batches: str | None = option(
        None, "A folder into which each micro-batch is written, for `composer-plugins compare`."
    )
    record_every: int = option(1, "One in so many optimizer steps is recorded.")

    def __new__(cls, *args: Any, **kwargs: Any) -> "ComposerGRPOConfig":
        # This runs before the dataclass's __init__, whose TypeError does not name the nearest option.
        accepted = inspect.getfullargspec(cls.__init__)
        known = {*accepted.args, *accepted.kwonlyargs}
        if accepted.varkw is None and (unknown_names := [name for name in kwargs if name not in known]):
            raise unknown_option(unknown_names[0], known, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        wrong = Findings()
        for name in PARAMS:
            if isinstance(value := getattr(self, name), str):
                try:
                    setattr(self, name, json.loads(value))
                except json.JSONDecodeError as error:
                    problem = f"{value!r} is not JSON: {error}"
                    wrong.append(Finding("error", name, problem, 'write it as {"beta": 0.5}'))
        enforce(wrong)
        super().__post_init__()
        enforce(self.findings())

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_resolved"}

    @property
    def resolved(self) -> Resolved:
        """What the options ask for. They are read once, and again only after one of them has been changed."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        known: tuple[dict[str, Any], Resolved] | None = vars(self).get("_resolved")
        if known is None or known[0] != values:
            known = self.__dict__["_resolved"] = (values, self._resolve())
        return known[1]

    def _resolve(self) -> Resolved:
        """Read the options; one ConfigError with all that cannot be understood."""
        values = {name: getattr(self, name) for name in ComposerConfig.model_fields if hasattr(self, name)}
        values |= {name: {} for name in PARAMS if values[name] is None}
        given, hints = self._given(), None
        asked, found = ask(
            TRL,
            {name: x for name, x in values.items() if name in given},
            upstream.moved(self),
            defaults=values,
            framework_loss=TRL_LOSS,
            given=given,
            inert="warning",
            write=lambda option, value: f"{option}={json.dumps(value)}",  # as Python and as JSON
        )
        with found.collected():
            hints = self._hint_source()
        found.refuse()
        assert asked is not None and hints is not None
        policy = asked.chosen
        if policy is not None and upstream.corrects_rollouts(self):
            policy = policy.with_optional("log_weights")
        mode, source = self._mode(policy) if policy is not None else ("", "")
        return Resolved(asked.config, policy, mode, source, asked.hint, asked.replay, hints, tuple(found))

    def _given(self) -> list[str]:
        """Our options that are not at their default."""
        defaults = {one.name: one.default for one in fields(ComposerGRPOConfig)}
        names = [*ComposerConfig.model_fields, "hint_source", *RolloutOptions.model_fields]
        return [name for name in names if name in defaults and getattr(self, name) != defaults[name]]

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with the options, and what has no effect."""
        found = self.resolved
        config, policy, wrong = found.composer, found.policy, Findings()
        findings = [*found.findings, *self._without_effect(config)]
        if policy is not None:
            wrong += self._wrong_options_beside(policy, found.mode)
            findings += self._kl_twice(policy)
        if self.remove_unused_columns and (config.hint_weight or config.replay_weight):
            problem = "it is True, which drops the columns that the hint and replay channels read"
            remedy = "leave it False, TRL's default for GRPO"
            wrong.append(Finding("error", "remove_unused_columns", problem, remedy))
        if config.on_bad_reward == "drop" and not upstream.leaves_out_unrewarded():
            problem = (
                f"it is 'drop', and TRL {upstream.VERSION} gives a completion without a reward the reward 0"
            )
            remedy = "set it to 'zero', or install trl 1.16 or newer"
            wrong.append(Finding("error", "on_bad_reward", problem, remedy))
        wrong += [] if wrong else self._length_of_the_denominator(found)
        yield from [*wrong, *findings]

    def get_process_log_level(self) -> int:
        """The log level of this process. ConfigError if a trainer without the mixin is made with this config.

        The constructor of every Trainer calls it, and nothing else tells a config which trainer has it.
        """
        caller = inspect.stack(context=0)[1].frame.f_locals.get("self")
        if isinstance(caller, Trainer) and not hasattr(caller, "_composer"):
            name = type(caller).__name__
            problem = (
                f"it is a {type(self).__name__}, and {name} has no ComposerLossMixin as its first base, so "
            )
            problem += "policy, hint and replay would have no effect"
            remedy = f"use ComposerGRPOTrainer, or write class My{name}(ComposerLossMixin, {name})"
            raise ConfigError("args", problem, remedy)
        return int(super().get_process_log_level())

    def _hint_source(self) -> HintSource:
        if self.hint_source not in HINT_SOURCES:
            raise unknown("hint_source", str(self.hint_source), HINT_SOURCES)
        values = {name: getattr(self, name) for name in RolloutOptions.model_fields}
        try:
            options = RolloutOptions.model_validate(values)
        except ValidationError as error:
            raise error_of(complaints(error, RolloutOptions.model_fields)) from None
        options.check()
        if self.hint_source == "successful_rollout":
            return SuccessfulRollouts(options)
        source = EnvironmentHints if self.hint_source == "environment" else HintColumn
        return source(self.teacher_prompt_template)

    def _without_effect(self, config: ComposerConfig) -> Iterator[Finding]:
        """Yield a warning for each option that has no effect with the others.

        A weight that is 0 may be set to 0, so this is not an error.
        """
        given = self._given()
        inert: dict[str, tuple[str, Any]]  # the option, and its value, that an inert option needs
        inert = dict.fromkeys(RolloutOptions.model_fields, ("hint_source", "successful_rollout"))
        if self.hint_source == "successful_rollout":
            feedback = ("feedback_template", "environment_feedback_only_without_solution")
            off = () if self.include_environment_feedback else feedback
            inert = dict.fromkeys(off, ("include_environment_feedback", True))
            inert["teacher_prompt_template"] = ("hint_source", "column")
        for name in inert:
            if name in given:
                key, value = inert[name]
                problem = f"it has no effect, because {key} is {getattr(self, key)!r}"
                yield Finding("warning", name, problem, f"set {key} to {value!r}, or remove it")
        if config.policy_weight == 0:
            problem = "it has no effect, because policy_weight is 0"
            for name in ("policy", "policy_params"):
                if name in given:
                    yield Finding("warning", name, problem, "set policy_weight above 0, or remove it")

    def _mode(self, choice: Choice) -> tuple[str, str]:
        """How our policy loss is reduced, a key of `MODES_IN_WORDS`, and what decided so.

        "" for a loss_type that does not name a denominator.
        """
        if self.loss_type is not None:
            return MODES.get(self.loss_type, ""), f"set by loss_type={self.loss_type}"
        if not choice.mode:
            default = upstream.DEFAULTS["loss_type"]
            return MODES[default], f"TRL's default, {default}: the loss names no reduction"
        source = "its attribute mode" if choice.is_import_path else f"as in {choice.upstream or 'the paper'}"
        return choice.mode, f"{source}: loss_type is not set"

    def _length_of_the_denominator(self, found: Resolved) -> Iterator[Finding]:
        """Yield an error where the denominator is max_completion_length, and that is None."""
        if found.mode == MODES["dr_grpo"] and self.max_completion_length is None:
            loss = f"loss_type={self.loss_type!r}" if self.loss_type else f"policy={self.policy!r}"
            problem = f"it is None, and {loss} divides the loss of a completion by it"
            remedy = "set it to the number of tokens that a completion may have, or set another loss_type"
            yield Finding("error", "max_completion_length", problem, remedy)

    def _kl_twice(self, policy: Choice) -> Iterator[Finding]:
        """Yield a warning where TRL adds its KL to a loss that may have its own."""
        if self.beta and "ref_logprobs" in (*policy.loss.needs, *policy.optional):
            problem = (
                f"it is {self.beta:g}, so TRL adds its own KL, and {policy.name!r} takes ref_logprobs, so "
            )
            problem += "a KL in it counts too"
            remedy = "leave the KL out of the loss"
            if "ref_logprobs" in policy.loss.needs:
                remedy += ", or set beta to 0: the trainer then loads the reference for the loss alone"
            yield Finding("warning", "beta", problem, remedy)

    def _wrong_options_beside(self, policy: Choice, mode: str) -> Iterator[Finding]:
        """Yield an error for each option of TRL that does not work with our policies."""
        denominators = ", ".join(MODES)
        if mode not in MODES_IN_WORDS:
            problem = f"it is {self.loss_type!r}, which is not a denominator for policy {policy.name!r}"
            if self.loss_type is None:
                problem = f"it is not set, and {policy.name!r} is reduced by {mode}, which TRL does not have"
            yield Finding("error", "loss_type", problem, f"set one of {denominators}")
        terms = {"beta": "KL", "entropy_coef": "entropy bonus", "use_adaptive_entropy": "entropy bonus"}
        for key, term in terms.items():
            if mode == "token-sum" and getattr(self, key, False):
                problem = f"TRL's {term} is a mean, and {policy.name!r} is a sum over tokens"
                yield Finding(
                    "error", key, problem, f"leave it at 0, or set loss_type to one of {denominators}"
                )
        corrected = upstream.corrects_rollouts(self)
        if corrected and "log_weights" in policy.optional:
            weights = self.vllm_importance_sampling_mode
            if VLLM_WEIGHTS.get(weights, ("", ""))[1] != "token":
                problem = f"it is {weights!r}, and {policy.name!r} takes one weight per token"
                yield Finding("error", "vllm_importance_sampling_mode", problem, "set it to 'token_truncate'")
        if corrected and "rollout_logprobs" in (*policy.loss.needs, *policy.optional):
            problem = f"{policy.name!r} contains the ratio to vLLM already, and would be corrected twice"
            yield Finding("error", "vllm_importance_sampling_correction", problem, "set it to False")


# The options that GRPOConfig does not have.
OWN = tuple(one.name for one in fields(ComposerGRPOConfig) if one.name not in upstream.DEFAULTS)


class ComposerParser(TrlParser):
    """TrlParser, but an unknown key, in the YAML file or on the command line, names its nearest match."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Refuse a key of the YAML file that no dataclass has."""
        self._refuse(super().set_defaults_with_config(**kwargs), kwargs)
        return []

    def parse_args_into_dataclasses(self, args: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Refuse an unknown option before the dataclasses are made, whose errors are about values."""
        known, words = self.parse_known_args(args)
        self._refuse(words, vars(known))
        return super().parse_args_into_dataclasses(args, **kwargs)

    def _refuse(self, words: list[str], given: Mapping[str, Any]) -> None:
        for word in words:
            if word.startswith("--"):
                name = word.removeprefix("--").split("=")[0]
                known = {one.name for options in self.dataclass_types for one in fields(options)}
                raise unknown_option(name, known, given)
        if words:
            raise ConfigError("arguments", f"{' '.join(words)!r} belongs to no option", "remove it")
