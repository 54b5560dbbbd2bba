"""What a run of verl must have for `algorithm.composer`: the rest of its config, and the data's columns.

The trainer raises the first fault in its `__init__`; `composer-plugins doctor --verl` lists them all.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from composer_plugins.adapters.verl_parts.rules import NODE, TRAINER, Channels, named
from composer_plugins.columns import CHOSEN, HINT, REJECTED
from composer_plugins.errors import ConfigError, unknown

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss"
LOSS_MODE = f"{LOSS}.loss_mode"
TARGET = "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig"
SENT = f"{LOSS}._target_={TARGET} +{LOSS}.composer='${{{NODE}}}'"
ESTIMATOR = "algorithm.adv_estimator"
OF_THE_ADVANTAGE = ("advantage", "advantage_params")
OF_THE_POLICY = ("policy", "policy_params", "policy_weight")
ENGINES = ("fsdp", "fsdp2")
REFERENCE = f"{ACTOR}.use_kl_loss=True, with {ACTOR}.kl_loss_coef=0 if no KL is wanted"


class Fault(NamedTuple):
    """One thing that a channel cannot be had with."""

    key: str
    what: str
    remedy: str

    def error(self) -> ConfigError:
        """As the trainer raises it."""
        return ConfigError(f"{self.key}: {self.what}; {self.remedy}")


def at(tree: Any, path: str, default: Any = None) -> Any:
    """An entry of verl's config, a DictConfig or a plain mapping; `default` where there is none."""
    for key in path.split("."):
        tree = tree.get(key) if hasattr(tree, "get") else None
        if tree is None:
            return default
    return tree


def faults(tree: Any, channels: Channels) -> Iterator[Fault]:
    """What in verl's config keeps something that the node asks for from being learned."""
    yield from _not_run(tree, channels)
    yield from _unseen(tree, channels)
    if channels.asks_reference and not (_has_reference(tree) or has_adapter(tree)):
        frozen = channels.hint is not None and channels.config.hint_teacher == "base"
        asker = "hint_teacher 'base'" if frozen else f"replay_loss {channels.config.replay_loss!r}"
        yield Fault(
            f"{ACTOR}.use_kl_loss",
            f"{asker} asks the reference policy, and this run keeps none",
            f"set {REFERENCE}",
        )
    if channels.hint or channels.replay:
        yield from _of_both(tree)
    if channels.compares_distributions:
        yield from _of_logits(tree)
    if channels.replay:
        yield from _of_replay(tree)
    if at(tree, f"trainer.v1.{TRAINER}") is not None:
        yield Fault(
            f"trainer.v1.{TRAINER}",
            "it is read by nobody",
            "set trainer.v1.sync: this trainer has verl's synchronous one's options",
        )


def names(tree: Any, estimators: Collection[str], losses: Collection[str]) -> Iterator[ConfigError]:
    """The estimator and the loss mode that verl's registries do not have."""
    for key, default, known in (
        (ESTIMATOR, "gae", estimators),
        (LOSS_MODE, "vanilla", losses),
    ):
        if (name := str(at(tree, key, default))) not in known:
            yield unknown(key, name, known)


def wanted_columns(channels: Channels) -> dict[str, str]:
    """The data set's columns, each with the weight that wants it."""
    hint = {HINT: "hint_weight"} if channels.hint else {}
    return hint | (dict.fromkeys((CHOSEN, REJECTED), "replay_weight") if channels.replay else {})


def missing_column(file: str, columns: Collection[str], channels: Channels) -> Fault | None:
    """The first column that a channel wants and the file has not."""
    for column, weight in wanted_columns(channels).items():
        if column not in columns:
            return Fault(
                "data.train_files",
                f"{weight} > 0 needs the column {column!r}, and {file} has {', '.join(sorted(columns))}",
                f"add it (None in rows without one), or set {weight}=0",
            )
    return None


def is_ours(name: str) -> bool:
    """Whether a registered name is `composer` or `composer/<name>`."""
    return name == "composer" or name.startswith("composer/")


def _not_run(tree: Any, channels: Channels) -> Iterator[Fault]:
    """What the node says of the advantage or the policy, where one of verl's own runs."""
    for key, default, options, remedy in (
        (ESTIMATOR, "gae", OF_THE_ADVANTAGE, f"{ESTIMATOR}=composer"),
        (LOSS_MODE, "vanilla", OF_THE_POLICY, f"{LOSS_MODE}=composer {SENT}"),
    ):
        name = str(at(tree, key, default))
        said = [option for option in options if option in channels.config.model_fields_set]
        if said and not is_ours(name):
            yield Fault(
                f"{NODE}.{said[0]}", f"it is set, and not run: {key} is {name!r}", f"{remedy}, or remove it"
            )


def _unseen(tree: Any, channels: Channels) -> Iterator[Fault]:
    """What the node says of the policy, where a loss of ours runs and does not get that."""
    name, sent = str(at(tree, LOSS_MODE, "vanilla")), at(tree, f"{LOSS}.composer")
    if not is_ours(name):
        return
    if sent is not None and at(tree, f"{LOSS}._target_") != TARGET:
        yield Fault(
            f"{LOSS}._target_",
            "it does not take the node composer beside it",
            f"set {LOSS}._target_={TARGET}",
        )
    seen = _plain(sent) if hasattr(sent, "items") else {}
    if (policy := named(name)) is not None:
        seen = {"policy": policy} | seen
    for option in OF_THE_POLICY:
        if option not in channels.config.model_fields_set:
            continue
        if option not in seen:
            what = f"it is set, and the actor's workers, where {name!r} runs, do not see it"
        elif seen[option] != getattr(channels.config, option):
            what = f"it is set, and the actor's workers have {seen[option]!r}"
        else:
            continue
        yield Fault(f"{NODE}.{option}", what, f"set {SENT}")


def _plain(node: Any) -> Any:
    return {str(key): _plain(value) for key, value in node.items()} if hasattr(node, "items") else node


def _has_reference(tree: Any) -> bool:
    return bool(at(tree, f"{ACTOR}.use_kl_loss", False) or at(tree, "algorithm.use_kl_in_reward", False))


def has_adapter(tree: Any) -> bool:
    """LoRA: the actor without its adapter is the reference."""
    model = "actor_rollout_ref.model"
    rank = at(tree, f"{model}.lora.rank", 0) or at(tree, f"{model}.lora_rank", 0)
    return bool(rank or at(tree, f"{model}.lora_adapter_path"))


def _of_both(tree: Any) -> Iterator[Fault]:
    if at(tree, "trainer.use_v1", True) is False:
        yield Fault("trainer.use_v1", f"False, and {TRAINER} is a trainer of the v1 kind", "remove it")
    if at(tree, "distillation.enabled", False):
        yield Fault(
            "distillation.enabled",
            "True, and verl's distillation puts its own loss where hint and replay have theirs",
            "set it to False: a teacher of another model is no hint",
        )


def _of_replay(tree: Any) -> Iterator[Fault]:
    if at(tree, f"{ACTOR}.shuffle", False):
        yield Fault(
            f"{ACTOR}.shuffle",
            "True mixes the replayed pairs into mini-batches at random, and each must have its share",
            f"set {ACTOR}.shuffle=False, verl's default",
        )
    if at(tree, LOSS_MODE) == "geo_mean":
        yield Fault(
            LOSS_MODE,
            "'geo_mean' is a mean over all rows of a micro-batch, and replayed rows would be among them",
            "name composer/gmpo, which counts those that have a response",
        )
    mode = at(tree, f"{ACTOR}.loss_agg_mode")
    if mode == "seq-mean-token-sum-norm" and at(tree, f"{ACTOR}.loss_scale_factor") is None:
        yield Fault(
            f"{ACTOR}.loss_scale_factor",
            f"none: {mode!r} then divides by the width of a micro-batch, which a replayed row may widen",
            "set it, to data.max_response_length for one",
        )


def _of_logits(tree: Any) -> Iterator[Fault]:
    if at(tree, "actor_rollout_ref.model.use_fused_kernels", False):
        yield Fault(
            "actor_rollout_ref.model.use_fused_kernels",
            "True: the logits are never there to be compared",
            "set it to False, or use hint_divergence='sampled_token'",
        )
    for owner in ("actor", "ref"):
        model = f"actor_rollout_ref.{owner}"
        if (strategy := at(tree, f"{model}.strategy", "fsdp")) not in ENGINES:
            yield Fault(
                f"{model}.strategy",
                f"{strategy!r}, and only verl's FSDP engine shows a loss the whole vocabulary's logits",
                "use fsdp or fsdp2, or hint_divergence='sampled_token'",
            )
        if at(tree, f"{model}.fsdp_config.pad_to_length", False):
            yield Fault(
                f"{model}.fsdp_config.pad_to_length",
                "True, with which verl's engine shows a loss no logits",
                "set it to False, or use hint_divergence='sampled_token'",
            )
        key = f"{model}.ulysses_sequence_parallel_size"
        if (at(tree, key, 1) or 1) > 1:
            yield Fault(
                key,
                f"{at(tree, key)}: each rank sees a part of every sequence, and cannot tell which",
                "set it to 1, or use hint_divergence='sampled_token'",
            )
