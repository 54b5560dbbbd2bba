"""verl's advantage estimators, on drawn rollouts.

verl counts with integers and divides them in float32: Bessel's n / (n - 1) where it whitens, GPG's alpha.
Whitening is compared in float64 where n - 1 is a power of two, so that the quotient is exact, and at
float32's tolerance on any mask; alpha's rounding is undone.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.batches import FLOAT64, Rollouts, rollouts
from composer_plugins.conformance.claims import Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel as row_kernel
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.frameworks.verl import CHOOSES, VERL
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.draws import Draw, flag

ADVANTAGES = "advantage estimators"  # the registry
FLOAT32 = torch.float32
GAMMAS = [0.0, 0.9, 1.0]

# Of a group of one verl's loop divides by 1 + eps in float32.
SINGLETON_ROUNDING = float(torch.tensor(1.0) + 1e-6) / (1 + 1e-6)

kernel: Callable[..., Any] = partial(row_kernel, "advantage")


def row_of(estimator: str) -> str:
    """The row of verl's estimator, by the table that users run."""
    return VERL.row_of(**{CHOOSES["advantage"]: estimator}) or ""


def our_estimator(estimator: str, **options: Any) -> Callable[..., Any]:
    """Our kernel for verl's estimator, with options of verl's algorithm that are not at verl's default."""
    row = row_of(estimator)
    params: dict[str, Any] = VERL.parameters(find_one(row, "advantage").loss, options)
    found: Callable[..., Any] = kernel(row, **params)
    return found


def lengths(batch: Rollouts) -> Tensor:
    """Unmasked tokens of each row."""
    return batch.mask.sum(-1).to(FLOAT64)


def singletons(batch: Rollouts) -> Tensor:
    """Which rows are alone in their group."""
    return (batch.ids == batch.ids.unsqueeze(1)).sum(0) == 1


def precision(batch: Rollouts, rows: Tensor, eps: float | None) -> float:
    """The largest term behind an advantage: a reward, over the group's deviation plus `eps`.

    A mean is as precise as the group's largest reward, and a division by a small deviation magnifies that.
    """
    rewards = batch.rewards[rows]
    divisor = 1.0 if eps is None or len(rewards) < 2 else min(1.0, float(rewards.std()) + eps)
    return float(rewards.abs().max()) / divisor


def by_group(
    ours: Tensor,
    theirs: Tensor,
    batch: Rollouts,
    *,
    eps: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = FLOAT64,
) -> Iterator[Compared]:
    """Advantages per row and verl's per token, group by group; `eps` is added to a deviation."""
    per_token = ours.unsqueeze(-1) * batch.mask
    for i in batch.ids.unique():
        group = batch.ids == i
        terms = 2 * int(group.sum())  # a mean, and a deviation
        magnitude = scale * precision(batch, group, eps)
        yield Compared(per_token[group], theirs[group], terms, magnitude, dtype)


def grpo(draw: Draw) -> Iterator[Compared]:
    """In a loop over the rows."""
    batch = rollouts(draw)
    found = our_estimator("grpo")(batch.rewards, batch.ids)
    rounded = torch.where(singletons(batch), found / SINGLETON_ROUNDING, found)
    yield from by_group(rounded, upstream.advantages("grpo", batch), batch, eps=1e-6)


def grpo_vectorized(draw: Draw) -> Iterator[Compared]:
    """verl's is in float32."""
    batch = rollouts(draw)
    found = our_estimator("grpo_vectorized")(batch.rewards, batch.ids)
    theirs = upstream.advantages("grpo_vectorized", batch)
    yield from by_group(found, theirs, batch, eps=1e-6, dtype=FLOAT32)


def dr_grpo(name: str, dtype: torch.dtype, draw: Draw) -> Iterator[Compared]:
    """GRPO's without the deviation, by its own name and by verl's option."""
    batch = rollouts(draw)
    theirs = upstream.advantages(name, batch, norm_adv_by_std_in_grpo=False)
    for one in (kernel("dr_grpo@verl"), our_estimator(name, norm_adv_by_std_in_grpo=False)):
        yield from by_group(one(batch.rewards, batch.ids), theirs, batch, dtype=dtype)


def rloo(name: str, draw: Draw) -> Iterator[Compared]:
    """They differ in groups of one."""
    batch = rollouts(draw)
    yield from by_group(
        our_estimator(name)(batch.rewards, batch.ids), upstream.advantages(name, batch), batch
    )


def opo(draw: Draw) -> Iterator[Compared]:
    """Of a group without an unmasked token verl's baseline is 0 / 0."""
    batch = rollouts(draw)
    found = our_estimator("opo")(batch.rewards, batch.ids, lengths(batch))
    yield from by_group(found, torch.where(batch.mask, upstream.advantages("opo", batch), 0.0), batch)


def gpg(draw: Draw) -> Iterator[Compared]:
    """With and without f_norm."""
    batch, f_norm = rollouts(draw), draw.choose([None, 0.5, 3.0], "f_norm")
    option = {} if f_norm is None else {"f_norm": f_norm}
    count = max(1, int(batch.rewards.count_nonzero()))
    alpha = len(batch.rewards) / count
    rounding = float(len(batch.rewards) / torch.tensor(count)) / alpha  # an integer times 1 / count
    found = kernel(row_of("gpg"), **option)(batch.rewards, batch.ids) * rounding
    theirs = upstream.advantages("gpg", batch, **option)
    yield from by_group(found, theirs, batch, scale=alpha / (f_norm or 1.0))


def pass_at_k(draw: Draw) -> Iterator[Compared]:
    """With and without the deviation."""
    batch = rollouts(draw, min_group=2)
    scaled = flag(draw, "norm_adv_by_std_in_grpo")
    theirs = upstream.advantages("grpo_passk", batch, config={"norm_adv_by_std_in_grpo": scaled})
    options = {} if scaled else {"norm_adv_by_std_in_grpo": False}
    found = our_estimator("grpo_passk", **options)(batch.rewards, batch.ids)
    yield from by_group(found, theirs, batch, eps=1e-6 if scaled else None)


def claim(row: str, theirs: str, compare: Any, note: str = "") -> Claim:
    """About one estimator of the registry."""
    return Claim("advantage", row, theirs, Place(ADVANTAGES, {"name": theirs}), compare, note)


CLAIMS = [
    claim(row_of("grpo"), "grpo", grpo),
    claim(row_of("grpo_vectorized"), "grpo_vectorized", grpo_vectorized, "verl's is in float32"),
    claim("dr_grpo@verl", "grpo", partial(dr_grpo, "grpo", FLOAT64), "norm_adv_by_std_in_grpo off"),
    claim(
        *("dr_grpo@verl", "grpo_vectorized", partial(dr_grpo, "grpo_vectorized", FLOAT32)),
        "norm_adv_by_std_in_grpo off; verl's is in float32",
    ),
    *(claim(row_of(name), name, partial(rloo, name)) for name in ("rloo", "rloo_vectorized")),
    claim(row_of("opo"), "opo", opo),
    claim(row_of("gpg"), "gpg", gpg),
    claim(row_of("grpo_passk"), "grpo_passk", pass_at_k),
]
