"""Losses moved from TRL and to it: each difference is named, and TRL's own code has value and gradient."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin.channels import PolicyChannel
from composer_plugins.adapters.trl_mixin.health import TrlHealth
from composer_plugins.adapters.trl_mixin.mixin import ComposerGRPOTrainer
from composer_plugins.adapters.trl_mixin.schedule import Weights
from composer_plugins.config import ComposerConfig
from composer_plugins.conformance.trl_claims import upstream
from composer_plugins.conformance.trl_claims.grpo_options import DEFAULTS, Options
from parity_tests.rigs import tiny
from parity_tests.rigs.moved_losses import (
    FRAMEWORKS,
    Batch,
    assert_trains,
    batch,
    check_pair,
    check_terms,
    every,
    expected,
    moved,
    pairs,
)

WITH_TRL = [one for one in pairs(FRAMEWORKS) if "trl" in one.values]


@pytest.mark.parametrize(("source", "target", "name"), WITH_TRL)
def test_a_migration_is_exact_or_names_what_the_target_cannot_do(source: str, target: str, name: str) -> None:
    check_pair(source, target, name)


def test_a_kl_or_a_correction_that_trl_lacks_stops_no_migration() -> None:
    check_terms("trl")


def value_and_gradient(table: Mapping[str, Any], given: Batch) -> tuple[Tensor, Tensor]:
    """The loss of `_compute_loss` with a config that `migrate` wrote, and its gradient."""
    options = tiny.config(**{"per_device_train_batch_size": 64, "num_generations": 2} | dict(table))
    resolved, weights = options.resolved, Weights(SimpleNamespace(args=options))
    assert resolved.policy is not None
    of_trl = {name: x for name in DEFAULTS if (x := getattr(options, name, None)) is not None}
    of_trl |= {"loss_type": options.loss_type or "grpo", "steps_per_generation": 1}
    trainer = object.__new__(ComposerGRPOTrainer)
    trainer.__dict__ |= vars(upstream.grpo_trainer(Options(**of_trl)))
    trainer.__dict__ |= {"_composer": resolved.composer, "_weights": weights}
    trainer.__dict__ |= {"_policy": PolicyChannel(resolved.policy, resolved.mode, resolved.mode_source)}
    trainer.__dict__ |= {"_hint": None, "_replay": None, "_forward": None}
    trainer.__dict__ |= {"_health": TrlHealth(trainer, ComposerConfig(health=False), [trainer._policy])}
    logprobs = given.logprobs.clone().requires_grad_()
    forward = (logprobs, torch.zeros_like(logprobs), None)
    of_others = {"old_per_token_logps": given.old.clone(), "sampling_per_token_logps": given.rollout}
    inputs = upstream.grpo_inputs(given.mask, given.advantages[:, 0], **of_others)
    own = "_get_per_token_logps_and_entropies"
    with patch.object(GRPOTrainer, own, lambda *_, **__: forward), upstream.in_float64():
        loss = trainer._compute_loss(None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize("name", every("trl"))
def test_trl_trains_what_was_written(name: str) -> None:
    """Through `_compute_loss`. TRL multiplies masked tokens by 0, so none is NaN."""
    for written, objective in moved("trl", name):
        assert_trains(*value_and_gradient(written.table, batch()), expected(objective, batch()))
