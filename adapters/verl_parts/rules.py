"""`algorithm.composer` as the one config, and what of it verl's registries or its trainer can deliver."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from composer_plugins.bundled.adapters import VERL
from composer_plugins.catalogue import Choice
from composer_plugins.checks import check_top_k
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError

NODE = "algorithm.composer"
TRAINER = "composer_sync"
REMEDY = f"set trainer.v1.trainer_mode={TRAINER} (verl 0.9 and later), or the weight to 0"
OWN = {
    "anchor": "verl keeps old_log_probs itself",
    "mismatch": "verl corrects for the rollout engine itself: algorithm.rollout_correction",
    "mismatch_params": "verl corrects for the rollout engine itself: algorithm.rollout_correction",
    "hint_ema_rate": "verl keeps no average of the policy's weights",
}
OF_A_CHANNEL = {  # what does nothing without the weight
    "hint": ("divergence", "params", "estimator", "teacher", "top_k", "t_start"),
    "replay": ("loss", "params"),
}

_carried = ContextVar("carried", default=False)


@contextmanager
def carried() -> Iterator[None]:
    """Inside, a trainer carries the hint and replay channels, and the registries' functions need not."""
    token = _carried.set(True)
    try:
        yield
    finally:
        _carried.reset(token)


class Channels(NamedTuple):
    """What the node asks for besides the policy; None: not learned."""

    config: ComposerConfig
    hint: Choice | None
    replay: Choice | None

    @property
    def hint_is_loss(self) -> bool:
        """Whether the hint is a term of the loss, and not a part of the advantages."""
        return self.hint is not None and self.config.hint_estimator != "advantage"

    @property
    def compares_distributions(self) -> bool:
        """Whether the hint needs more of the teacher than the sampled token's log-probability."""
        return self.hint_is_loss and self.hint is not None and "student_logits" in self.hint.loss.needs

    @property
    def asks_reference(self) -> bool:
        """Whether verl's reference policy is asked: a frozen teacher, or a preference loss's reference."""
        frozen = self.hint is not None and self.config.hint_teacher == "base"
        return frozen or (self.replay is not None and "ref_chosen" in self.replay.loss.needs)


def named(name: str) -> str | None:
    """Which loss `composer/<name>` is; None: the node says it."""
    return name.removeprefix("composer/") if name.startswith("composer/") else None


def chosen(
    node: Mapping[str, Any], kind: Literal["policy", "advantage"], name: str | None
) -> tuple[ComposerConfig, Choice]:
    """The node and its loss of this kind, or one ConfigError that names the key, for verl's registries.

    `name` is what a registered name says; the node may name a dialect of it. None: the node decides.
    """
    try:
        if name is not None and str(node.get(kind, name)).partition("@")[0] != name:
            raise ConfigError(
                f"{kind} is {node[kind]!r} beside composer/{name}: say composer alone, or remove it"
            )
        config = _own(node if name is None else {kind: name, **node})
        if not _carried.get():
            _refuse_channels(config)
        choice = config.choose_policy() if kind == "policy" else config.choose_advantage()
        refuse_what_verl_cannot_feed(choice)
        return config, choice
    except ConfigError as error:
        raise ConfigError(f"{NODE}: {error}") from None


def channels(node: Mapping[str, Any]) -> Channels:
    """The node as the trainer carries it, or one ConfigError that names the key."""
    try:
        config = _own(node)
        for channel, options in OF_A_CHANNEL.items():
            idle = [f"{channel}_{name}" for name in options if f"{channel}_{name}" in node]
            if idle and not getattr(config, f"{channel}_weight"):
                raise ConfigError(f"{', '.join(idle)} without a {channel}_weight: set it, or remove them")
        found = Channels(
            config,
            config.choose_hint() if config.hint_weight else None,
            config.choose_replay() if config.replay_weight else None,
        )
        if config.policy_weight != 1 and not (found.hint or found.replay):
            raise ConfigError(f"policy_weight {config.policy_weight:g}, and no channel to weigh against")
        _check_hint(found)
        if found.replay is not None:
            refuse_what_verl_cannot_feed(found.replay)
        return found
    except ConfigError as error:
        raise ConfigError(f"{NODE}: {error}") from None


def refuse_what_verl_cannot_feed(choice: Choice) -> None:
    """Raise ConfigError for a loss that needs more than verl hands over, or the whole batch at once."""
    name = f"{choice.loss.kind} {choice.loss.name!r}"
    if choice.loss.over_batch and choice.loss.kind == "policy":
        raise ConfigError(f"{name} is a statistic of the whole batch, and verl cuts it into micro-batches")
    if choice.loss.over_batch and choice.loss.kind == "preference":
        raise ConfigError(f"{name} sorts the batch's pairs anew, and a pair's weight would go to another's")
    if missing := VERL.missing(choice.loss):
        raise ConfigError(
            f"{name} needs {', '.join(missing)}, which verl does not hand over: "
            "composer-plugins list --framework verl shows what it can run"
        )


def _own(node: Mapping[str, Any]) -> ComposerConfig:
    for key, reason in OWN.items():
        if key in node:
            raise ConfigError(f"{key}: {reason}; remove it")
    return ComposerConfig.parse(node)


def _refuse_channels(config: ComposerConfig) -> None:
    for channel in ("hint", "replay"):
        if getattr(config, f"{channel}_weight"):
            raise ConfigError(
                f"{channel}_weight > 0, and a registered estimator or loss is given rewards and "
                "log-probabilities of the sampled tokens alone, so no channel but the policy can be had "
                f"from verl's registries: {REMEDY}"
            )
    if config.policy_weight != 1:
        raise ConfigError(
            f"policy_weight {config.policy_weight:g} weighs the policy against channels that are not here: "
            f"remove it, or set trainer.v1.trainer_mode={TRAINER}"
        )


def _check_hint(found: Channels) -> None:
    config, hint = found.config, found.hint
    if hint is None:
        return
    if config.hint_teacher == "ema":
        raise ConfigError(
            "hint_teacher='ema': verl keeps no average of the policy's weights; 'base' is the reference "
            "policy and 'live' the policy itself"
        )
    if config.hint_estimator == "advantage" and config.hint_params:
        raise ConfigError("hint_params belong to a divergence, and hint_estimator='advantage' computes none")
    refuse_what_verl_cannot_feed(hint)
    if found.compares_distributions:
        if config.hint_top_k is None:
            raise ConfigError(
                f"hint_divergence {hint.loss.name!r} compares distributions, and the teacher's is handed "
                "over as its largest entries and a tail: set hint_top_k (SDPO: 100), or "
                "hint_divergence='sampled_token'"
            )
        if "teacher_logits" in hint.loss.needs:
            check_top_k(hint, config.hint_top_k + 1)
            _check_temperature(hint)
    elif config.hint_top_k is not None:
        what = "hint_estimator='advantage'" if not found.hint_is_loss else f"{hint.loss.name!r}"
        raise ConfigError(f"hint_top_k, and {what} reads the sampled token alone: remove it")


def _check_temperature(hint: Choice) -> None:
    parameter = hint.loss.parameters.get("temperature")
    temperature = hint.params.get("temperature", parameter.default if parameter else 1.0)
    if temperature != 1:
        raise ConfigError(
            f"{hint.loss.name}'s temperature is {temperature:g}: verl's logits are at rollout.temperature "
            "already, and the tail of a top k cannot be tempered; leave it at 1"
        )
