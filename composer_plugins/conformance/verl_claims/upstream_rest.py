"""verl's reductions, KL estimators, rollout corrections and distillation losses, called on drawn tensors."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.losses import (
    DISTILLATION_LOSS_REGISTRY,
    compute_topk_loss,
    distillation_loss,
    get_distillation_loss_fn,
)
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, agg_loss, kl_penalty
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.config.actor import RolloutCorrectionConfig

from composer_plugins.conformance.batches import Batch
from composer_plugins.conformance.verl_claims.upstream import actor, modes, of_verl

__all__ = ["agg_loss", "kl_penalty"]
PROMPT = 1  # tokens of prompt; verl reads the logits one position before each response token


def registered() -> dict[str, set[str]]:
    """By registry, the names that verl itself gave."""
    return {
        "policy losses": of_verl(POLICY_LOSS_REGISTRY),
        "advantage estimators": of_verl(ADV_ESTIMATOR_REGISTRY),
        "distillation losses": of_verl(DISTILLATION_LOSS_REGISTRY),
        "aggregation modes": set(modes()),
        "rollout corrections": set(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
    }


def correction_weights(batch: Batch, options: dict[str, Any]) -> Tensor:
    """verl's importance weights of a rollout."""
    difference = batch.logprobs - batch.old_logprobs
    found, _ = rollout_corr_helper.compute_rollout_correction_weights(
        difference, batch.mask.long(), **options
    )
    weights: Tensor = found
    return weights


def rejection_mask(batch: Batch, option: str, threshold: str) -> Tensor:
    """Which tokens verl keeps."""
    difference = batch.logprobs - batch.old_logprobs
    found, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        difference, batch.mask.long(), option, threshold
    )
    mask: Tensor = found
    return mask


def correction_config(options: dict[str, Any]) -> Any:
    """algorithm.rollout_correction."""
    return RolloutCorrectionConfig(**options)


def distillation_config(**options: Any) -> Any:
    """verl's defaults, and `options` of distillation_loss."""
    return DistillationConfig(distillation_loss=DistillationLossConfig(**options))


def engine_batch(mask: Tensor, counts: dict[str, int] | None = None, **more: Tensor) -> Any:
    """What verl's engine passes: one prompt token per row, responses as wide as the mask."""
    rows, tokens = mask.shape
    columns = {
        "prompts": torch.ones(rows, PROMPT, dtype=torch.int64),
        "responses": torch.ones(rows, tokens, dtype=torch.int64),
        "attention_mask": torch.ones(rows, PROMPT + tokens, dtype=torch.int64),
        "response_mask": mask.long(),
    }
    data = TensorDict(columns, batch_size=[rows])
    for name, value in more.items():
        data[name] = nested(value)
    for name, count in (counts or {}).items():
        data.set_non_tensor(name, count)
    return data


def packed(x: Tensor) -> Tensor:
    """[rows, tokens, ...] as verl packs it: every row with one more position, which it never reads."""
    return torch.cat([x, x[:, :1]], 1).flatten(0, 1)


def nested(x: Tensor) -> Tensor:
    """[rows, tokens, ...] as verl nests it, with one more position too."""
    return torch.nested.as_nested_tensor(list(torch.cat([x, x[:, :1]], 1)), layout=torch.jagged)


def unpacked(x: Tensor, mask: Tensor) -> Tensor:
    """The unmasked tokens of a packed output."""
    return x.detach().view(mask.shape[0], -1)[:, :-1][mask]


def topk_distillation(logits: Tensor, config: Any, mode: str, data: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """verl's reduced loss of a teacher's k largest entries, and what it keeps per token."""
    settings = actor(loss_agg_mode=mode)
    per_token = compute_topk_loss(settings, config, data, packed(logits).unsqueeze(0), "thd")
    output = {name: value.squeeze(0) for name, value in per_token.items()}
    loss, _ = distillation_loss(settings, config, output, data)
    return loss, output


def distillation_estimate(name: str, config: Any, logprobs: Tensor, data: Any) -> Tensor:
    """verl's estimate of the divergence from the sampled token, per token."""
    per_token, _ = get_distillation_loss_fn(name)(actor(), config, {"log_probs": packed(logprobs)}, data)
    found: Tensor = per_token
    return found
