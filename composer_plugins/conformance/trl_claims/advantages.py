"""Advantages, and the weights of a rollout by another engine, of live GRPO and RLOO trainers.

A tiny trainer runs its own `_generate_and_score_completions` on scripted completions. Rewards and
log-probabilities are drawn in float64 and put in where TRL's reward functions and model give them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.claims import Compared
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream_rollouts
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.frameworks.trl import VLLM_BOUNDS, VLLM_WEIGHTS
from composer_plugins.testing.draws import Draw, generator

WEIGHTS = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)


def draw_rewards(draw: Draw) -> tuple[Tensor, int]:
    """[rows, components], often tied, some NaN (a reward function that returned None); the group's size."""
    g = generator(draw)
    groups, size = draw.integer(1, 4, "groups"), draw.integer(1, 5, "group size")
    shape = (groups * size, draw.integer(1, 3, "reward functions"))
    values = torch.randint(0, 5, shape, generator=g).double() / 10 + draw.choose([0.0, -3.3], "offset")
    missing = torch.rand(shape, generator=g) < draw.choose([0.0, 0.3, 0.9], "missing")
    return values.masked_fill(missing, torch.nan), size


def of_trl(values: Tensor, size: int, trainer: str = "GRPOTrainer", **options: Any) -> Tensor:
    """The advantages that TRL makes of these rewards."""
    weights = WEIGHTS[: values.shape[1]]
    return upstream_rollouts.advantages(
        values, trainer, num_generations=size, reward_weights=weights, **options
    )


def ids(values: Tensor, size: int) -> Tensor:
    """The group of each row."""
    return torch.arange(len(values)) // size


def parity(ours: Tensor, theirs: Tensor, values: Tensor) -> Compared:
    """TRL divides the rounding noise of equal rewards by as little as 1e-4, and GDPO that once more."""
    largest = float(values.nan_to_num().abs().max()) + 1
    scale = max(1.0, float(theirs.abs().max()))
    return Compared(ours, theirs, len(values), largest / 1e-4, scale=scale)


def weighted_sum(values: Tensor) -> tuple[Tensor, Tensor]:
    """One reward per row, and where there is one; a function that returned None adds nothing."""
    scorable = ~values.isnan().all(-1)
    return (values.nan_to_num() * WEIGHTS[: values.shape[1]]).sum(-1).where(scorable, torch.nan), scorable


def grouped(scale: str, draw: Draw) -> Iterator[Compared]:
    """A row that no reward function could score counts nowhere, and gets 0."""
    values, size = draw_rewards(draw)
    theirs = of_trl(values, size, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize")
    total, scorable = weighted_sum(values)
    row, keywords = ("dr_grpo@trl", {}) if scale == "none" else ("grpo@trl", {"scale": scale})
    yield parity(kernel("advantage", row, **keywords)(total, ids(values, size), scorable), theirs, values)


def gdpo(draw: Draw) -> Iterator[Compared]:
    """Each component is normalised, and then their sum."""
    values, size = draw_rewards(draw)
    theirs = of_trl(values, size, multi_objective_aggregation="normalize_then_sum")
    ours = kernel("advantage", "gdpo@trl")(
        values,
        ids(values, size),
        component_weights=WEIGHTS[: values.shape[1]],
        component_mask=~values.isnan(),
    )
    yield parity(ours, theirs, values)


def rloo(draw: Draw) -> Iterator[Compared]:
    """Normalised, it is GRPO's over the batch, of the rows that had another to be compared with."""
    (values, size), normalised = draw_rewards(draw), draw.choose([False, True], "normalize_advantages")
    theirs = of_trl(values, size, "RLOOTrainer", **upstream_rollouts.rloo_options(len(values), normalised))
    total, scorable = weighted_sum(values)
    ours = kernel("advantage", "rloo@trl")(total, ids(values, size), scorable)
    if normalised and size > 1:
        compared = scorable & (scorable.view(-1, size).sum(1) > 1).repeat_interleave(size)
        ours = kernel("advantage", "grpo@trl")(ours, torch.zeros_like(ids(values, size)), compared)
    yield parity(ours, theirs, values)


def a2po(draw: Draw) -> Iterator[Compared]:
    """Rewards of one completion of each prompt, and of several of the reference."""
    g, beta = generator(draw), draw.choose([None, 0.1, 3.0], "beta1")
    shape = (draw.integer(1, 4, "prompts"), draw.integer(1, 5, "num_value_samples"))
    reference = torch.randint(0, 5, shape, generator=g).double() / 10 + draw.choose([0.0, -3.3], "offset")
    rewards = reference[:, 0] + torch.rand(shape[0], generator=g)
    theirs = upstream_rollouts.a2po_advantages(rewards, reference, 0.5 if beta is None else beta)
    options = {} if beta is None else {"beta": beta}
    ours = kernel("advantage", "a2po@trl", **options)(rewards, reference)
    yield Compared(ours, theirs, shape[1], 10.0)


def draw_rollouts(draw: Draw) -> tuple[Tensor, Tensor, list[int]]:
    """log-probabilities under the trainer and under the engine, which did not know all; lengths."""
    g = generator(draw)
    lengths = [draw.integer(1, 6, "length") for _ in range(draw.integer(1, 4, "rows"))]
    shape = (len(lengths), max(lengths))
    old = -4 * torch.rand(shape, generator=g, dtype=torch.float64)
    spread = draw.choose([0.1, 2.0], "spread")
    engine = old + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    return old, engine.masked_fill(torch.rand(shape, generator=g) < 0.1, torch.nan), lengths


def correction(mode: str, draw: Draw) -> Iterator[Compared]:
    """A log-probability that the engine did not give counts as the trainer's own."""
    (old, engine, lengths), low = draw_rollouts(draw), draw.choose([None, 0.5], "clip_min")
    mask = torch.arange(old.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    theirs = (
        upstream_rollouts.weights(mode, old, engine, lengths, low, 3.0).expand(mask.shape).where(mask, 0.0)
    )
    (name, level), known = VLLM_WEIGHTS[mode], torch.where(engine.isnan(), old, engine)
    bounds = dict(zip(VLLM_BOUNDS[name], (low, 3.0), strict=True))
    ours = kernel("correction", f"{name}@trl")(old, known, mask, level=level, **bounds)
    yield Compared(ours, theirs, old.shape[1], 10.0)


advantage, of_vllm = partial(claim, "advantage"), partial(claim, "correction")
CLAIMS = [
    *(
        advantage(row, "GRPOTrainer", f"scale_rewards={x}", partial(grouped, x), scale_rewards=x)
        for x, row in {"group": "grpo@trl", "batch": "grpo@trl", "none": "dr_grpo@trl"}.items()
    ),
    *(
        advantage(row, "GRPOTrainer", x, compare, multi_objective_aggregation=x)
        for row, x, compare in (
            ("grpo@trl", "sum_then_normalize", partial(grouped, "group")),
            ("gdpo@trl", "normalize_then_sum", gdpo),
        )
    ),
    advantage("rloo@trl", "RLOOTrainer", "advantages", rloo),
    advantage("a2po@trl", "A2POTrainer", "advantages", a2po),
    *(
        of_vllm(f"{row}@trl", "GRPOTrainer", x, partial(correction, x), vllm_importance_sampling_mode=x)
        for x, (row, _) in VLLM_WEIGHTS.items()
    ),
]
