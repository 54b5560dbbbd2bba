"""A drawn batch through TRL's `_compute_loss`, with a config that `migrate` wrote."""

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin.channels import PolicyChannel
from composer_plugins.adapters.trl_mixin.mixin import ComposerGRPOTrainer
from composer_plugins.adapters.trl_mixin.schedule import Weights
from composer_plugins.adapters.trl_mixin.surface import ComposerGRPOConfig
from composer_plugins.conformance.trl_claims import upstream
from composer_plugins.conformance.trl_claims.grpo_options import DEFAULTS, Options
from docs.generator.drawn import Batch


def value_and_gradient(table: Mapping[str, Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of TRL's `_compute_loss`, or of ours over it, with these options, and its gradient."""
    ours = table.get("policy", "trl") != "trl"
    cls = ComposerGRPOConfig if ours else GRPOConfig
    size = {"output_dir": "unused", "use_cpu": True, "bf16": False, "per_device_train_batch_size": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        options = cls(**size, **{"num_generations": 2} | dict(table))
    given = {name: getattr(options, name) for name in DEFAULTS if hasattr(options, name)}
    given |= {
        "loss_type": options.loss_type or "grpo",
        "epsilon_low": options.epsilon,
        "epsilon_high": options.epsilon if options.epsilon_high is None else options.epsilon_high,
        "steps_per_generation": 1,
    }
    trainer = upstream.grpo_trainer(Options(**given))
    more: dict[str, Tensor | None] = {
        "old_per_token_logps": batch.old.clone(),
        "ref_per_token_logps": batch.reference,
        "sampling_per_token_logps": batch.rollout,
    }
    inputs = upstream.grpo_inputs(batch.mask, batch.advantages[:, 0], **more)
    logprobs = batch.logprobs.clone().requires_grad_()
    if not ours:
        loss = upstream.policy_loss(trainer, logprobs, torch.zeros_like(logprobs), inputs)
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0]
    assert isinstance(options, ComposerGRPOConfig)
    choice = options.resolved.policy
    assert choice is not None
    instance = object.__new__(ComposerGRPOTrainer)
    channel = PolicyChannel(choice, options.resolved.mode, options.resolved.mode_source)
    instance.__dict__ |= vars(trainer) | {"_composer": options.resolved.composer, "_policy": channel}
    weights = Weights(SimpleNamespace(args=options))
    instance.__dict__ |= {"_hint": None, "_replay": None, "_forward": None, "_weights": weights}
    forward = (logprobs, torch.zeros_like(logprobs), None)
    own = GRPOTrainer._get_per_token_logps_and_entropies
    GRPOTrainer._get_per_token_logps_and_entropies = lambda *_, **__: forward
    try:
        with upstream.in_float64():
            loss = instance._compute_loss(None, inputs)
    finally:
        GRPOTrainer._get_per_token_logps_and_entropies = own
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]
