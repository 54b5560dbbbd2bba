"""The installed verl, called on drawn tensors: its configs, its losses, and what it reduces them with.

The masks given to verl are 0 and 1 in int64, as its trainer's are: a length plus 1e-8 is then taken in
float32, where it is the length, and everything else stays in float64.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    agg_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)

from composer_plugins.adapters.verl_plugin.convention import actor_config
from composer_plugins.conformance.batches import Batch, Rollouts
from composer_plugins.frameworks.verl import VERL

actor = actor_config


@cache
def modes() -> tuple[str, ...]:
    """The aggregation modes of the installed verl; there was no token-sum before 0.9."""
    one, found = torch.ones(1, 1), []
    for mode in VERL.denominators:
        try:
            agg_loss(one, one.long(), mode)
            found.append(mode)
        except ValueError:
            continue
    return tuple(found)


def policy_loss(name: str, batch: Batch, config: Any, mode: str) -> tuple[Tensor, Tensor, dict[str, float]]:
    """verl's loss, its gradient in the log-probabilities, and what it logs."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=batch.old_logprobs,
        log_prob=logprobs,
        advantages=batch.advantages.clone(),
        response_mask=batch.mask.long(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=batch.weights,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, metrics


def names(ids: Iterable[int]) -> Any:
    """Group ids as verl has them: strings in an array of objects."""
    return np.array([f"prompt {i}" for i in ids], dtype=object)


def advantages(estimator: str, batch: Rollouts, /, **more: Any) -> Tensor:
    """verl's advantages per token."""
    return estimated(estimator, batch, **more)[0]


def estimated(estimator: str, batch: Rollouts, /, **more: Any) -> tuple[Tensor, Tensor]:
    """verl's advantages and returns per token."""
    options = {
        "token_level_rewards": batch.token_rewards.clone(),
        "response_mask": batch.mask.long(),
        "index": names(batch.ids.tolist()),
    }
    found: tuple[Tensor, Tensor] = get_adv_estimator_fn(estimator)(**(options | more))
    return found


def of_verl(registry: Mapping[str, Callable[..., Any]]) -> set[str]:
    """The names that verl itself registered: a plugin's, our own adapter's too, are left out."""
    return {name for name, function in registry.items() if function.__module__.startswith("verl.")}


def registered() -> dict[str, set[str]]:
    """By registry, the names that verl itself gave."""
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    return {
        "policy losses": of_verl(POLICY_LOSS_REGISTRY),
        "advantage estimators": of_verl(ADV_ESTIMATOR_REGISTRY),
        "distillation losses": of_verl(DISTILLATION_LOSS_REGISTRY),
        "aggregation modes": set(modes()),
        "rollout corrections": set(SUPPORTED_ROLLOUT_RS_OPTIONS),
    }
