"""`ComposerGRPOConfig`: TRL's GRPOConfig with the three channels, and a parser that knows typos."""

import inspect
import json
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig, TrlParser

from composer_plugins.adapters.trl_mixin.trl_facts import CLIPPED_LIKE_TRL, LOSS_TYPES, UNTOUCHED
from composer_plugins.bundled.adapters import TRL as ADAPTER
from composer_plugins.catalogue import Choice, Loss
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, unknown

PARAMS = ("policy_params", "hint_params", "replay_params")


def option(default: Any, help: str) -> Any:
    """A dataclass field with the help text that TRL's parser shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class ComposerGRPOConfig(GRPOConfig):
    """GRPOConfig, and what each channel is: total = policy + hint_weight * hint + replay_weight * replay.

    With its defaults the loss is TRL's own, bit for bit. Everything is checked when the config is made:
    an unknown name or key, a parameter out of range, a combination that TRL cannot deliver.
    """

    policy: str = option(
        UNTOUCHED,
        "Policy loss: 'trl' leaves TRL's own term (loss_type, epsilon ...) untouched; any other name of "
        "the catalogue (grpo, dapo, gspo, cispo, dppo_tv ...) replaces it, and loss_type then chooses "
        "only the denominator.",
    )
    policy_params: dict[str, Any] | str | None = option(
        None, "Keyword parameters of the policy kernel, as a dict or as JSON."
    )
    policy_weight: float = option(
        1.0,
        "Weight of TRL's whole loss: the policy term, its KL, its entropy bonus, MoE's aux loss.",
    )
    hint_weight: float = option(0.0, "Weight of hint self-distillation; needs the column privileged_context.")
    hint_divergence: str = option("jsd", "Divergence from the teacher: jsd, forward_kl, ..., sampled_token.")
    hint_params: dict[str, Any] | str | None = option(
        None, "Keyword parameters of the divergence, as a dict or as JSON, e.g. {'beta': 0.5}."
    )
    hint_teacher: str = option(
        "base",
        "Who sees the hint: 'base', the weights that the trainer was constructed with, frozen (to resume, "
        "construct it with the original model, not with the checkpoint); 'ema', a moving average of the "
        "policy; 'live', the policy itself (measured to collapse).",
    )
    hint_ema_rate: float = option(
        0.05,
        "How far the ema teacher moves to the policy at each step. 0.05 is SDPO's; at the codebook recipe's "
        "learning rate of 1e-3 it collapsed, and 0.002 learned.",
    )
    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "The teacher's prompt. For conversational prompts {prompt} is the last user message.",
    )
    replay_weight: float = option(
        0.0, "Weight of replayed preferences; needs the columns chosen and rejected."
    )
    replay_loss: str = option("dpo", "Preference loss: dpo or simpo.")
    replay_params: dict[str, Any] | str | None = option(
        None, "Keyword parameters of the preference loss, as a dict or as JSON, e.g. {'beta': 0.1}."
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> "ComposerGRPOConfig":
        # Before the generated __init__, whose TypeError names no nearest match.
        accepted = inspect.signature(cls.__init__).parameters
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
            return super().__new__(cls)  # a subclass with an __init__ of its own
        for name in kwargs:
            if name not in accepted:
                raise unknown("option", name, accepted)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in PARAMS:
            if isinstance(value := getattr(self, name), str):
                try:
                    setattr(self, name, json.loads(value))
                except json.JSONDecodeError as error:
                    raise ConfigError(f"{name} is {value!r}, which is no JSON: {error}") from None
        super().__post_init__()
        config = self.composer
        policy = self.policy_choice()
        if policy is not None:
            self._check_policy_route(policy.loss)
        for choice in (policy, config.choose_hint(), config.choose_replay()):
            _refuse_what_trl_cannot_feed(choice)
        if self.remove_unused_columns and (config.hint_weight or config.replay_weight):
            raise ConfigError(
                "remove_unused_columns=True drops the columns that the hint and replay channels read: "
                "leave it False, TRL's default for GRPO"
            )

    @property
    def composer(self) -> ComposerConfig:
        """These fields as the library's one config model."""
        names = [
            name for name in ComposerConfig.model_fields if hasattr(self, name)
        ]  # TRL corrects by itself
        values = {name: getattr(self, name) for name in names}
        return ComposerConfig.parse(
            {name: {} if value is None and name in PARAMS else value for name, value in values.items()},
            untouched=UNTOUCHED,
        )

    def policy_choice(self) -> Choice | None:
        """Our policy loss, with `policy_params` and TRL's own clip options where they are set; None: TRL's.

        TRL's epsilon, epsilon_high and delta keep their meaning for losses that clip as TRL's GRPO does;
        for any other loss, setting one of them is an error rather than an option that does nothing. An
        epsilon at TRL's default counts as not set, so that gspo keeps its own.
        """
        config = self.composer
        if config.policy == UNTOUCHED:
            return None
        chosen = config.choose_policy(UNTOUCHED)
        default_epsilon = next(f.default for f in fields(GRPOConfig) if f.name == "epsilon")
        trl: dict[str, Any] = {}
        if self.epsilon != default_epsilon:
            trl |= {"clip_low": self.epsilon, "clip_high": self.epsilon}
        if self.epsilon_high is not None:
            trl["clip_high"] = self.epsilon_high
        if self.delta is not None:
            trl["ratio_cap"] = self.delta
        if trl and chosen.loss.name not in CLIPPED_LIKE_TRL.get("ratio_cap" in trl, ()):
            raise ConfigError(
                f"epsilon, epsilon_high and delta are not parameters of policy={config.policy!r}: leave "
                "them at TRL's defaults and set policy_params"
            )
        for name, value in config.policy_params.items():
            if name in trl and trl[name] != value:
                raise ConfigError(
                    f"policy_params sets {name}={value} and TRL's own option asks for {trl[name]}: set one"
                )
        return chosen._replace(params=chosen.loss.check({**chosen.params, **trl}))

    def _check_policy_route(self, loss: Loss) -> None:
        policy = loss.name
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(
                f"loss_type={self.loss_type!r} beside policy={policy!r}: a policy of ours takes only its "
                f"denominator from loss_type, one of {', '.join(LOSS_TYPES)}"
            )
        if self.importance_sampling_level != "token":
            raise ConfigError(
                f"importance_sampling_level={self.importance_sampling_level!r} beside policy={policy!r}: "
                "the level belongs to the policy; for a sequence-level ratio use policy='gspo'"
            )
        corrected = self.use_vllm and self.vllm_importance_sampling_correction
        if corrected and "rollout_logprobs" in loss.needs:
            raise ConfigError(
                f"policy={policy!r} measures its ratio from vLLM's log-probabilities already, and TRL's "
                "correction would weigh the mismatch twice: vllm_importance_sampling_correction=False"
            )


def _refuse_what_trl_cannot_feed(choice: Choice | None) -> None:
    if choice is None:
        return
    if choice.loss.over_batch:
        raise ConfigError(
            f"{choice.loss.kind} {choice.loss.name!r} is a statistic of the whole batch, which TRL cuts into "
            "micro-batches: the loss would depend on per_device_train_batch_size"
        )
    if not (missing := ADAPTER.missing(choice.loss)):
        return
    raise ConfigError(
        f"{choice.loss.kind} {choice.loss.name!r} needs {', '.join(missing)}, which TRL's trainer does not "
        "have: composer-plugins list --framework trl shows what it can run"
    )


class ComposerParser(TrlParser):
    """TrlParser, but an unknown key, in the YAML file or on the command line, names its nearest match."""

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Refuse a key of the YAML file that no dataclass has."""
        self._refuse(super().set_defaults_with_config(**kwargs))
        return []

    def parse_args_into_dataclasses(self, args: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Refuse an unknown option before the dataclasses are made, whose errors are about values."""
        self._refuse(self.parse_known_args(args)[1])
        return super().parse_args_into_dataclasses(args, **kwargs)

    def _refuse(self, words: list[str]) -> None:
        for word in words:
            if word.startswith("--"):
                name = word.removeprefix("--").split("=")[0]
                raise unknown("option", name, {action.dest for action in self._actions})
        if words:
            raise ConfigError(f"arguments without an option: {' '.join(words)}")
