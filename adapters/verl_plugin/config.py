"""`algorithm.composer` as the one config: in the driver, and by `ComposerPolicyLossConfig` in workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from verl.workers.config import PolicyLossConfig

from composer_plugins.bundled.adapters import VERL
from composer_plugins.catalogue import Choice
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError

NODE = "algorithm.composer"
OWN = {
    "anchor": "verl keeps old_log_probs itself",
    "mismatch": "verl corrects for the rollout engine itself: algorithm.rollout_correction",
    "mismatch_params": "verl corrects for the rollout engine itself: algorithm.rollout_correction",
}


@dataclass
class ComposerPolicyLossConfig(PolicyLossConfig):
    """verl's policy_loss with the node `composer`, which reaches the actor's workers in no other way.

    actor_rollout_ref.actor.policy_loss._target_=composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.composer='${algorithm.composer}'
    """

    composer: dict[str, Any] = field(default_factory=dict)


def node_of(config: Any) -> dict[str, Any]:
    """The `composer` node of a config of verl's, {} if there is none: DictConfig, dataclass or dict."""
    node = config.get("composer") if hasattr(config, "get") else getattr(config, "composer", None)
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if node is not None and not isinstance(node, Mapping):
        raise ConfigError(f"{NODE} is {node!r}; wanted a table of options")
    return {str(key): value for key, value in (node or {}).items()}


def parse(node: Mapping[str, Any], kind: str, name: str | None) -> ComposerConfig:
    """The node, checked for what the registries alone can deliver, or one ConfigError that names the key.

    `name` is what a registered name says of the node's `kind` ("policy", "advantage"); None: nothing.
    """
    try:
        for key, reason in OWN.items():
            if key in node:
                raise ConfigError(f"{key}: {reason}; remove it")
        if name is not None and str(node.get(kind, name)).partition("@")[0] != name:
            raise ConfigError(
                f"{kind} is {node[kind]!r} beside composer/{name}: say composer alone, or remove it"
            )
        config = ComposerConfig.parse(node if name is None else {kind: name, **node})
        _refuse_channels(config)
        return config
    except ConfigError as error:
        raise ConfigError(f"{NODE}: {error}") from None


def _refuse_channels(config: ComposerConfig) -> None:
    for channel in ("hint", "replay"):
        if getattr(config, f"{channel}_weight"):
            raise ConfigError(
                f"{channel}_weight > 0, and a registered estimator or loss is given rewards and "
                "log-probabilities of the sampled tokens alone: no channel but the policy can be had from "
                "verl's registries; set it to 0"
            )


def refuse_what_verl_cannot_feed(choice: Choice) -> None:
    """Raise ConfigError for a loss that needs more than verl hands over, or the whole batch at once."""
    name = f"{choice.loss.kind} {choice.loss.name!r}"
    if choice.loss.over_batch and choice.loss.kind == "policy":
        raise ConfigError(
            f"{NODE}: {name} is a statistic of the whole batch, and verl cuts it into micro-batches"
        )
    if missing := VERL.missing(choice.loss):
        raise ConfigError(
            f"{NODE}: {name} needs {', '.join(missing)}, which verl does not hand over: "
            "composer-plugins list --framework verl shows what it can run"
        )
