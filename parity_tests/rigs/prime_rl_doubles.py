"""PRIME-RL's loss contract: doubles of what a custom loss is called with, and for what.

Written from the contract that 0.8.0 documents: the fields of `LossInputs`, how a packed micro-batch is
cut and summed, what it is divided by. `adapters/prime_rl_plugin/test_live.py` calls the real ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.prime_rl_claims.packs import Pack, packed

Loss = Callable[[Any], Any]
Sample = dict[str, Tensor]


@dataclass
class LossInputs:
    """What a custom loss is called with."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def sample(seed: int, length: int, *, reference: bool = False, weights: bool = False) -> Sample:
    """One sequence, its prompt masked out, in float64."""
    g = torch.Generator().manual_seed(seed)

    def logprobs() -> Tensor:
        return -0.05 - 3 * torch.rand(length, generator=g, dtype=torch.float64)

    policy = logprobs()
    rollout = policy + 0.3 * torch.randn(length, generator=g, dtype=torch.float64)
    drawn = {
        "trainer_logprobs": policy,
        "inference_logprobs": rollout.clamp(max=0),
        "advantages": torch.randn(1, generator=g, dtype=torch.float64).expand(length),
        "loss_mask": torch.arange(length) >= length // 3,
    }
    if reference:
        drawn["reference"] = logprobs()
    if weights:
        several = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
        drawn["weights"] = several[torch.randint(0, 4, (length,), generator=g)]
    return drawn


def trained(samples: list[Sample]) -> list[Sample]:
    """Samples whose log-probabilities are leaves."""
    return [s | {"trainer_logprobs": s["trainer_logprobs"].clone().requires_grad_()} for s in samples]


def compute_loss(pack: Pack, loss_fn: Loss, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch: the function once per sequence, summed and divided; its metrics stacked by key."""
    total = pack.trainer_logprobs[0].sum() * 0.0
    gathered: dict[str, list[Tensor]] = {}
    for i in range(len(pack.trainer_logprobs)):
        inputs = inputs_of(pack, i)
        if pack.weights is not None and not inputs.loss_mask.any():
            continue  # a stream that selects nothing: the function is not called
        out = loss_fn(inputs)
        total = total + out.loss
        for key, value in out.metrics.items():
            assert value.dim() == 0 and value.is_floating_point(), key  # anything else dies in a mean()
            gathered.setdefault(key, []).append(value.detach())
    return total / scale, {key: torch.stack(values) for key, values in gathered.items()}


def inputs_of(pack: Pack, i: int) -> LossInputs:
    """What the function is given for sequence i."""
    given = (pack.trainer_logprobs[i], pack.inference_logprobs[i])
    reference = None if pack.reference is None else pack.reference[i]
    mask = pack.loss_mask[i]
    if pack.weights is None:
        return LossInputs(*given, reference, pack.advantages[i], mask)
    weights = pack.weights[i]
    return LossInputs(*given, reference, pack.advantages[i], mask & (weights != 0), weights)


def sequence(one: Sample) -> LossInputs:
    """What the function is given for a sequence that is alone in its micro-batch."""
    return inputs_of(packed([one]), 0)


def step(cuts: Sequence[list[Sample]], loss_fn: Loss, padding: int = 0) -> list[Tensor]:
    """The gradients of one optimizer step, sample by sample, of these micro-batches."""
    packs = [packed(cut, padding) for cut in cuts]
    over = scale(packs)
    for pack in packs:
        compute_loss(pack, loss_fn, over)[0].backward()
    leaves = [one["trainer_logprobs"] for cut in cuts for one in cut]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]  # None: never called for


def scale(packs: Sequence[Pack]) -> float:
    """What every micro-batch of a step on one rank is divided by: the tokens that belong to the loss."""
    return max(sum(int(mask.sum()) for pack in packs for mask in members(pack)), 1)


def members(pack: Pack) -> list[Tensor]:
    """The tokens that belong to the loss."""
    if pack.weights is None:
        return pack.loss_mask
    return [m & (w != 0) for m, w in zip(pack.loss_mask, pack.weights, strict=True)]
