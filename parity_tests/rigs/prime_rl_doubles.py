"""PRIME-RL's loss contract by generation: doubles of what a custom loss is called with, and for what.

Written from the contract that its releases document: the fields of `LossInputs`, how a packed micro-batch is
cut and summed, what it is divided by. `adapters/prime_rl_plugin/test_live.py` calls the real ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.prime_rl_claims.packs import Pack, packed

Loss = Callable[[Any], Any]
Tensors = Sequence[Tensor]
Sample = dict[str, Tensor]


@dataclass
class WithTeacher:
    """v0.4 to v0.6."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor


@dataclass
class WithWeights:
    """v0.7 and later."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class WithMaskLogprobs(WithWeights):
    """After 559b447: also the log-probabilities of every token in the sampler's mask, [tokens, mask]."""

    trainer_mask_logprobs: Tensor | None = None
    inference_mask_logprobs: Tensor | None = None


@dataclass(frozen=True)
class Generation:
    """How one run of releases calls a custom loss."""

    name: str
    inputs: type[WithTeacher] | type[WithWeights]
    # "micro-batches", "own tokens" of the rank, "tokens" of the global batch, or the "weights" of these
    divides_by: str
    weighs: bool = False


GENERATIONS = {
    "v0.4.0": Generation("v0.4.0", WithTeacher, "micro-batches"),
    "v0.5.0": Generation("v0.5.0", WithTeacher, "own tokens"),
    "v0.6.0": Generation("v0.6.0", WithTeacher, "tokens"),
    "v0.8.0": Generation("v0.8.0", WithWeights, "tokens", weighs=True),
}
AFTER_559B447 = Generation("after 559b447", WithMaskLogprobs, "weights", weighs=True)


def of_release(since: str) -> Generation:
    """The double of the generation that begins with this release."""
    names = {"0.4": "v0.4.0", "0.5": "v0.5.0", "0.6": "v0.6.0", "0.7": "v0.8.0", "0.8.1.dev52": "v0.8.0"}
    return GENERATIONS[names[since]] if since in names else AFTER_559B447


def sample(seed: int, length: int, *, reference: bool = False, weights: bool = False) -> Sample:
    """One sequence, its prompt masked out, in float64."""
    g = torch.Generator().manual_seed(seed)

    def logprobs() -> Tensor:
        return -0.05 - 3 * torch.rand(length, generator=g, dtype=torch.float64)

    policy = logprobs()
    drawn = {
        "trainer_logprobs": policy,
        "inference_logprobs": (policy + 0.3 * torch.randn(length, generator=g, dtype=torch.float64)).clamp(
            max=0
        ),
        "advantages": torch.randn(1, generator=g, dtype=torch.float64).expand(length),
        "loss_mask": torch.arange(length) >= length // 3,
    }
    if reference:
        drawn["reference"] = logprobs()
    if weights:
        drawn["weights"] = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)[
            torch.randint(0, 4, (length,), generator=g)
        ]
    return drawn


def trained(samples: list[Sample]) -> list[Sample]:
    """Samples whose log-probabilities are leaves."""
    return [s | {"trainer_logprobs": s["trainer_logprobs"].clone().requires_grad_()} for s in samples]


def compute_loss(
    generation: Generation, pack: Pack, loss_fn: Loss, scale: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """One micro-batch: the function once per sequence, summed and divided; its metrics stacked by key."""
    total = pack.trainer_logprobs[0].sum() * 0.0 if generation.weighs else torch.zeros(())
    gathered: dict[str, list[Tensor]] = {}
    for i in range(len(pack.trainer_logprobs)):
        inputs = inputs_of(generation, pack, i)
        if generation.weighs and pack.weights is not None and not inputs.loss_mask.any():
            continue  # a stream that selects nothing: the function is not called
        out = loss_fn(inputs)
        total = total + out.loss
        for key, value in out.metrics.items():
            assert value.dim() == 0 and value.is_floating_point(), key  # anything else dies in a mean()
            gathered.setdefault(key, []).append(value.detach())
    return total / scale, {key: torch.stack(values) for key, values in gathered.items()}


def inputs_of(generation: Generation, pack: Pack, i: int) -> Any:
    """What the function is given for sequence i."""
    mask = pack.loss_mask[i]
    given = (pack.trainer_logprobs[i], pack.inference_logprobs[i])
    given += (None if pack.reference is None else pack.reference[i], pack.advantages[i])
    if not generation.weighs:
        return generation.inputs(*given, mask)
    if pack.weights is None:
        return generation.inputs(*given, mask, None)
    return generation.inputs(*given, mask & (pack.weights[i] != 0), pack.weights[i])


def sequence(one: Sample, generation: Generation = GENERATIONS["v0.8.0"]) -> Any:
    """What the function is given for a sequence that is alone in its micro-batch."""
    return inputs_of(generation, packed([one]), 0)


def step(
    generation: Generation, cuts: Sequence[list[Sample]], loss_fn: Loss, padding: int = 0
) -> list[Tensor]:
    """The gradients of one optimizer step, sample by sample, of these micro-batches."""
    packs = [packed(cut, padding) for cut in cuts]
    over = scale(generation, packs)
    for pack in packs:
        compute_loss(generation, pack, loss_fn, over)[0].backward()
    leaves = [one["trainer_logprobs"] for cut in cuts for one in cut]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]  # None: never called for


def scale(generation: Generation, packs: Sequence[Pack]) -> float:
    """What every micro-batch of a step on one rank is divided by."""
    if generation.divides_by == "weights":
        total = 0.0
        for pack in packs:
            for i, mask in enumerate(pack.loss_mask):
                total += float(mask.sum() if pack.weights is None else pack.weights[i][mask].sum())
        return total if total > 0 else 1.0
    if generation.divides_by == "micro-batches":
        return len(packs)
    return max(sum(int(mask.sum()) for pack in packs for mask in members(generation, pack)), 1)


def per_prompt(samples: Sequence[dict[str, Tensor]], groups: Sequence[int]) -> None:
    """`loss_aggregation = "prompt"`: a token weighs 1 / the tokens of its group. It replaces weights."""
    tokens = {group: 0 for group in groups}
    for group, sample in zip(groups, samples, strict=True):
        tokens[group] += int(sample["loss_mask"].sum())
    for group, sample in zip(groups, samples, strict=True):
        sample["weights"] = sample["loss_mask"].to(sample["advantages"].dtype) / tokens[group]


def members(generation: Generation, pack: Pack) -> list[Tensor]:
    """The tokens that belong to the loss."""
    if not generation.weighs or pack.weights is None:
        return pack.loss_mask
    return [m & (w != 0) for m, w in zip(pack.loss_mask, pack.weights, strict=True)]
