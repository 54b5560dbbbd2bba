"""The installed SkyRL on drawn tensors: its config, its losses, and its division of the advantages."""

import sys
import typing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import typing_extensions
from torch import Tensor

from composer_plugins.conformance.batches import Rollouts
from composer_plugins.errors import ComposerWarning
from composer_plugins.frameworks.skyrl import ALGORITHM

OWN = typing.TypedDict
if sys.version_info < (3, 12):  # there pydantic refuses typing's, which skyrl 0.3.0 has
    vars(typing)["TypedDict"] = typing_extensions.TypedDict
try:
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import compute_tis_ratio

    from composer_plugins.adapters.skyrl_loss.config import ComposerAlgorithmConfig
finally:
    vars(typing)["TypedDict"] = OWN


def policy_losses() -> dict[str, Any]:
    """SkyRL's registry of policy losses, including losses that others registered."""
    registry = ppo_utils.PolicyLossRegistry
    return {name: registry.get(name) for name in registry.list_available()}


def algorithm(options: Mapping[str, Any]) -> Any:
    """SkyRL's AlgorithmConfig with these options, by their keys from the root of its config."""
    config = ComposerAlgorithmConfig()
    for key, value in options.items():
        *path, name = key.removeprefix(f"{ALGORITHM}.").split(".")
        table: Any = config
        for part in path:
            table = getattr(table, part)
        if not hasattr(table, name):
            raise AttributeError(f"this SkyRL has no option {key}")
        setattr(table, name, value)
    return config


def divided(
    advantages: Tensor, mask: Tensor, reduction: str, length: int, prompts: Sequence[int], micro: int = 1
) -> Tensor:
    """SkyRL's division of the advantages of a mini-batch; `prompts` has the number of rows of each prompt."""
    ends = [sum(prompts[: i + 1]) for i in range(len(prompts))]
    found: Tensor = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        advantages,
        mask.to(advantages.dtype),
        reduction,
        micro,
        length,
        [(end - size, end) for end, size in zip(ends, prompts, strict=True)],
    )
    return found


def policy_loss(
    name: str, config: Any, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """What SkyRL's loss of this name returns, and its gradient in the log-probabilities."""
    return called(ppo_utils.PolicyLossRegistry.get(name), config, tensors)


def called(
    function: Any, config: Any, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """What a function returns that is called as SkyRL's policy worker does, and its gradient."""
    logprobs = tensors["logprobs"].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ComposerWarning)  # drawn numbers are not what anyone intends
        loss, metrics = function(
            logprobs,
            tensors["old_logprobs"],
            tensors["advantages"].clone(),
            config=config,
            loss_mask=tensors["mask"].to(logprobs.dtype),
            rollout_logprobs=tensors.get("rollout_logprobs"),
        )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, metrics


def estimated(name: str, batch: Rollouts, config: Any, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The advantages and the returns of SkyRL's estimator of this name, as its trainer calls it."""
    found: tuple[Tensor, Tensor] = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=batch.token_rewards.clone(),
        response_mask=batch.mask.to(batch.token_rewards.dtype),
        index=[f"prompt {i}" for i in batch.ids.tolist()],
        adv_estimator=name,
        config=config,
        values=values,
        gamma=config.gamma,
        lambd=config.lambd,
        grpo_norm_by_std=config.grpo_norm_by_std,
    )
    return found


def approx_kl(logprobs: Tensor, reference: Tensor, mask: Tensor, name: str) -> Tensor:
    """SkyRL's KL estimator."""
    found: Tensor = ppo_utils.compute_approx_kl(logprobs, reference, mask.to(logprobs.dtype), name)
    return found


def tis(old: Tensor, rollout: Tensor, mask: Tensor, config: Any) -> Tensor:
    """SkyRL's truncated importance weights."""
    options = config.off_policy_correction
    weights: Tensor = compute_tis_ratio(old, rollout, mask.to(old.dtype), options.tis_ratio_type, options)[0]
    return weights.expand(mask.shape)


def registered() -> dict[str, set[str]]:
    """The names of SkyRL's own in its registries."""
    registries = {
        "policy losses": ppo_utils.PolicyLossRegistry,
        "advantage estimators": ppo_utils.AdvantageEstimatorRegistry,
    }
    return {
        what: {name for name in registry.list_available() if not name.startswith("composer")}
        for what, registry in registries.items()
    }
