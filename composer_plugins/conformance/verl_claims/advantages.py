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
from composer_plugins.testing.inputs import with_junk

ADVANTAGES = "advantage estimators"  # the registry
FLOAT32 = torch.float32
GAMMAS = [0.0, 0.9, 1.0]

# Of a group of one verl's loop divides by 1 + eps in float32.
SINGLETON_ROUNDING = float(torch.tensor(1.0) + 1e-6) / (1 + 1e-6)

kernel: Callable[..., Any] = partial(row_kernel, "advantage")
# Our advantages [rows, tokens] of a batch, by the name of a row and its parameters.
Ours = Callable[..., Tensor]


def row_of(estimator: str) -> str:
    """The row of verl's estimator, by the table that users run."""
    return VERL.row_of(**{CHOOSES["advantage"]: estimator}) or ""


def params_of(estimator: str, **options: Any) -> dict[str, Any]:
    """Options of verl's algorithm that are not at verl's default, as parameters of our row."""
    found: dict[str, Any] = VERL.parameters(find_one(row_of(estimator), "advantage").loss, options)
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


def by_kernel(row: str, batch: Rollouts, **params: Any) -> Tensor:
    """Our kernel's advantages per token, of rewards with junk where the mask is False."""
    inputs = {"rewards": batch.rewards, "group_ids": batch.ids, "lengths": lengths(batch)}
    inputs |= {"token_rewards": with_junk(batch.token_rewards, batch.mask), "mask": batch.mask}
    loss = find_one(row, "advantage").loss
    params |= {"lengths": lengths(batch)} if "lengths" in loss.optional else {}
    found: Tensor = kernel(row)(*(inputs[need] for need in loss.needs), **params)
    return found if "token_rewards" in loss.needs else found.unsqueeze(-1) * batch.mask


def by_group(
    ours: Tensor,
    theirs: Tensor,
    batch: Rollouts,
    *,
    eps: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = FLOAT64,
) -> Iterator[Compared]:
    """Our advantages per token and verl's, group by group; `eps` is added to a deviation."""
    for i in batch.ids.unique():
        group = batch.ids == i
        terms = 2 * int(group.sum())  # a mean, and a deviation
        magnitude = scale * precision(batch, group, eps)
        yield Compared(ours[group], theirs[group], terms, magnitude, dtype)


def grpo(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """In a loop over the rows."""
    batch = rollouts(draw)
    found = ours(row_of("grpo"), batch)
    rounded = torch.where(singletons(batch).unsqueeze(-1), found / SINGLETON_ROUNDING, found)
    yield from by_group(rounded, upstream.advantages("grpo", batch), batch, eps=1e-6)


def grpo_vectorized(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """verl's is in float32."""
    batch = rollouts(draw)
    theirs = upstream.advantages("grpo_vectorized", batch)
    yield from by_group(ours(row_of("grpo_vectorized"), batch), theirs, batch, eps=1e-6, dtype=FLOAT32)


def dr_grpo(name: str, dtype: torch.dtype, ours: Ours, draw: Draw) -> Iterator[Compared]:
    """GRPO's without the deviation, by its own name and by verl's option."""
    batch, option = rollouts(draw), {"norm_adv_by_std_in_grpo": False}
    theirs = upstream.advantages(name, batch, **option)
    yield from by_group(ours("dr_grpo@verl", batch), theirs, batch, dtype=dtype)
    yield from by_group(ours(row_of(name), batch, **params_of(name, **option)), theirs, batch, dtype=dtype)


def undivided(name: str, ours: Ours, draw: Draw) -> Iterator[Compared]:
    """Without a deviation. RLOO's two differ in groups of one; OPO of an empty group is 0 / 0 in verl."""
    batch = rollouts(draw)
    theirs = torch.where(batch.mask, upstream.advantages(name, batch), 0.0)
    yield from by_group(ours(row_of(name), batch), theirs, batch)


def gpg(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """With and without f_norm."""
    batch, f_norm = rollouts(draw), draw.choose([None, 0.5, 3.0], "f_norm")
    option = {} if f_norm is None else {"f_norm": f_norm}
    count = max(1, int(batch.rewards.count_nonzero()))
    alpha = len(batch.rewards) / count
    rounding = float(len(batch.rewards) / torch.tensor(count)) / alpha  # an integer times 1 / count
    found = ours(row_of("gpg"), batch, **option) * rounding
    theirs = upstream.advantages("gpg", batch, **option)
    yield from by_group(found, theirs, batch, scale=alpha / (f_norm or 1.0))


def pass_at_k(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """With and without the deviation."""
    batch = rollouts(draw, min_group=2)
    scaled = flag(draw, "norm_adv_by_std_in_grpo")
    theirs = upstream.advantages("grpo_passk", batch, config={"norm_adv_by_std_in_grpo": scaled})
    params = {} if scaled else params_of("grpo_passk", norm_adv_by_std_in_grpo=False)
    found = ours(row_of("grpo_passk"), batch, **params)
    yield from by_group(found, theirs, batch, eps=1e-6 if scaled else None)


def claim(row: str, theirs: str, compare: Any, note: str = "") -> Claim:
    """About one estimator of the registry."""
    return Claim("advantage", row, theirs, Place(ADVANTAGES, {"name": theirs}), compare, note)


def claims_of(ours: Ours) -> list[Claim]:
    """The claims about these advantages."""
    rounded, off = "verl's is in float32", "norm_adv_by_std_in_grpo off"
    by_option = partial(dr_grpo, "grpo", FLOAT64, ours), partial(dr_grpo, "grpo_vectorized", FLOAT32, ours)
    return [
        claim(row_of("grpo"), "grpo", partial(grpo, ours)),
        claim(row_of("grpo_vectorized"), "grpo_vectorized", partial(grpo_vectorized, ours), rounded),
        claim("dr_grpo@verl", "grpo", by_option[0], off),
        claim("dr_grpo@verl", "grpo_vectorized", by_option[1], f"{off}; {rounded}"),
        *(
            claim(row_of(name), name, partial(undivided, name, ours))
            for name in ("rloo", "rloo_vectorized", "opo")
        ),
        claim(row_of("gpg"), "gpg", partial(gpg, ours)),
        claim(row_of("grpo_passk"), "grpo_passk", partial(pass_at_k, ours)),
    ]


CLAIMS = claims_of(by_kernel)
