"""Configs of verl with options of ours in them, and our policy losses, called as verl calls them."""

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.conformance.batches import Batch
from composer_plugins.conformance.verl_claims import upstream

ONES = Batch(*(-torch.ones(2, 3) for _ in range(3)), torch.ones(2, 3, dtype=torch.bool), None)


def algorithm(options: Mapping[str, Any] | None = None, **node: Any) -> Any:
    """`algorithm`, as the estimators get it, with these options of verl's and our node."""
    return OmegaConf.create({"adv_estimator": "composer", "gamma": 1.0, **(options or {}), "composer": node})


def composer_actor(node: dict[str, Any], info: dict[str, Any] | None = None, **options: Any) -> Any:
    """The actor's config with verl's options and counts; our policy_loss keeps the options of verl's own."""
    config = upstream.actor(info, **options)
    own = {name: value for name, value in config.policy_loss.items() if name != "loss_mode"}
    # verl's config refuses a plain assignment.
    policy_loss = ComposerPolicyLossConfig(loss_mode="composer", composer=node, **own)
    object.__setattr__(config, "policy_loss", policy_loss)
    return config


def policy_loss(
    name: str, batch: Batch, mode: str = "token-mean", info: dict[str, Any] | None = None, **node: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """A registered policy loss of ours with this node, its gradient, and what it logs."""
    return upstream.policy_loss(name, batch, composer_actor(node, info), mode)
