"""Our losses in verl's registries, called as verl calls them."""

from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import get_policy_loss_fn

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.conformance.verl_claims.batches import Batch
from composer_plugins.conformance.verl_claims.upstream import actor


def algorithm(**node: Any) -> Any:
    """`algorithm`, as the estimators get it: raw."""
    return OmegaConf.create({"adv_estimator": "composer", "gamma": 1.0, "composer": node})


def configured(info: dict[str, Any], node: dict[str, Any]) -> Any:
    """An actor's configuration whose policy_loss is ours, with the node."""
    config = actor(info)
    object.__setattr__(config, "policy_loss", ComposerPolicyLossConfig(composer=node))
    return config


def policy_loss(
    name: str, batch: Batch, mode: str, info: dict[str, Any], **node: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Our policy loss, called as ppo_loss calls it, and its gradient."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=batch.old_logprobs,
        log_prob=logprobs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=configured(info, node),
        rollout_is_weights=batch.weights,
    )
    return loss, torch.autograd.grad(loss, logprobs)[0], metrics
