"""Doubles of what slime passes to a loss, and of the functions of slime that a loss calls."""

from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.slime_claims.claims import arguments

PACKAGE = "slime.backends.megatron_utils"
MILES = "miles.backends.training_utils"


def args(**given: Any) -> Namespace:
    """slime's arguments as its parser leaves them, and in `composer` our options, or slime's own loss."""
    return arguments(**{"composer": {"policy": "grpo@slime"}, **given})


def log_probs(logits: Tensor, *, with_entropy: bool = False, response_lengths: list[int], **_: Any) -> Any:
    """The double takes the log-probabilities themselves in the place of logits, [1, tokens]."""
    parts = list(logits[0].split(response_lengths))
    found = {"log_probs": parts} | ({"entropy": [-x for x in parts]} if with_entropy else {})
    return torch.empty(0), found


def whole(x: Tensor, *_: Any) -> Tensor:
    """All tokens of a response: there is one rank."""
    return x


def modules() -> dict[str, ModuleType]:
    """slime's modules of losses and of context parallelism, by name."""
    loss: Any = ModuleType(f"{PACKAGE}.loss")
    loss.get_log_probs_and_entropy = log_probs
    loss.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    cp: Any = ModuleType(f"{PACKAGE}.cp_utils")
    cp.mpu = Namespace(get_context_parallel_world_size=lambda: 1)
    cp.all_gather_with_cp = cp.slice_log_prob_with_cp = whole
    names = ("slime", "slime.backends", PACKAGE)
    return {**{name: ModuleType(name) for name in names}, f"{PACKAGE}.loss": loss, f"{PACKAGE}.cp_utils": cp}


def miles_modules() -> dict[str, ModuleType]:
    """Miles' modules of the same."""
    logit: Any = ModuleType(f"{MILES}.loss_hub.logit_processors")
    logit.get_log_probs_and_entropy = lambda *words, **options: log_probs(*words, **options)[1]
    cp: Any = ModuleType(f"{MILES}.cp_utils")
    cp.all_gather_with_cp = cp.slice_log_prob_with_cp = whole
    parallel: Any = ModuleType(f"{MILES}.parallel")
    parallel.get_parallel_state = lambda: Namespace(cp=Namespace(size=1))
    named = {logit.__name__: logit, cp.__name__: cp, parallel.__name__: parallel}
    names = ("miles", "miles.backends", MILES, f"{MILES}.loss_hub")
    return {name: ModuleType(name) for name in names} | named


def batch(seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Log-probabilities of four responses, one after the other, and slime's batch of them."""
    g = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 6, 3]

    def near(x: list[Tensor], spread: float) -> list[Tensor]:
        return [(one + spread * torch.randn(one.shape, generator=g).double()).clamp(max=-1e-3) for one in x]

    own = [-0.05 - 4 * torch.rand(n, generator=g, dtype=torch.float64) for n in lengths]
    masks = [(torch.rand(n, generator=g) < 0.7).double() for n in lengths]
    masks[0][0] = masks[2][1] = 1.0
    old = near(own, 0.3)
    found = {
        "unconcat_tokens": [torch.zeros(n + 2, dtype=torch.long) for n in lengths],
        "total_lengths": [n + 2 for n in lengths],
        "response_lengths": lengths,
        "loss_masks": masks,
        "rollout_mask_sums": torch.stack([x.sum() for x in masks]),
        "log_probs": old,
        "rollout_log_probs": near(old, 0.1),
        "ref_log_probs": near(own, 0.5),
        "teacher_log_probs": near(own, 0.5),
        "advantages": [torch.randn(1, generator=g).double().expand(n) for n in lengths],
    }
    return torch.cat(own).unsqueeze(0).requires_grad_(), found


def reducer(given: dict[str, Any], per_token: bool = False) -> Callable[[Tensor], Tensor]:
    """slime's get_sum_of_sample_mean on one rank."""
    lengths, masks, sums = (given[name] for name in ("response_lengths", "loss_masks", "rollout_mask_sums"))

    def reduce(x: Tensor) -> Tensor:
        rows = zip(x.split(lengths), masks, sums, strict=True)
        means = [(one * m).sum() / (1 if per_token else n.clamp(min=1)) for one, m, n in rows]
        return torch.stack(means).sum()

    return reduce


def part(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    """Some of the responses."""
    return {name: x[rows] for name, x in given.items()}
