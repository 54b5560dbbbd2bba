"""verl's advantage estimators that give each token its own number, or whiten over the tokens of the batch."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_gae_advantage_return

from composer_plugins.conformance.batches import FLOAT64, Rollouts, rollouts
from composer_plugins.conformance.claims import Claim, Compared
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.advantages import (
    FLOAT32,
    GAMMAS,
    Ours,
    by_kernel,
    claim,
    kernel,
    lengths,
    params_of,
    precision,
    row_of,
    singletons,
)
from composer_plugins.frameworks.verl import TOKEN_BASELINES
from composer_plugins.testing.draws import Draw, flag
from composer_plugins.testing.inputs import with_junk


def token_level(batch: Rollouts, draw: Draw) -> Tensor:
    """The row's reward at one token, or rewards everywhere, the masked tokens included."""
    if flag(draw, "a reward per row"):
        return batch.token_rewards.clone()
    g = torch.Generator().manual_seed(draw.integer(0, 99, "token rewards"))
    return torch.randint(-3, 4, batch.mask.shape, generator=g).to(FLOAT64) / 10 + batch.token_rewards


def for_whitening(batch: Rollouts) -> tuple[Rollouts, torch.dtype]:
    """verl wants two unmasked tokens; the rewards move with the mask, and the precision follows its count."""
    mask = batch.mask.clone()
    if mask.sum() < 2:
        mask = torch.ones_like(mask)
    if mask.sum() < 2:
        batch = Rollouts(*(x.repeat_interleave(2, 0) for x in batch))
        mask = torch.ones_like(batch.mask)
    others = int(mask.sum()) - 1
    return batch._replace(mask=mask), FLOAT64 if others & (others - 1) == 0 else FLOAT32


def cut_to_a_power_of_two(batch: Rollouts) -> Rollouts:
    """As many unmasked tokens less, from the end, as make the count less one a power of two."""
    others = int(batch.mask.sum()) - 1
    wanted = 1 + (1 << (others.bit_length() - 1))
    kept = (batch.mask.flatten().cumsum(0) <= wanted).view(batch.mask.shape)
    return batch._replace(mask=batch.mask & kept)


def whitenable(draw: Draw, min_group: int = 1) -> tuple[Rollouts, torch.dtype]:
    """Rollouts with at least two unmasked tokens, and the precision in which verl whitens them."""
    batch, dtype = for_whitening(rollouts(draw, min_group))
    if dtype != FLOAT64 and flag(draw, "in float64"):
        batch, dtype = for_whitening(cut_to_a_power_of_two(batch))
        assert dtype == FLOAT64
    return batch, dtype


def whitened(
    ours: Tensor, theirs: Tensor, raw: Tensor, mask: Tensor, largest: float, dtype: torch.dtype
) -> Compared:
    """Per token; `largest` is the largest term of the `raw` advantages, which a small variance magnifies."""
    divisor = float((raw[mask].var() + 1e-8).sqrt())
    magnitude = largest * (1 + largest / divisor) / divisor
    ours, theirs = (torch.where(mask, x, 0.0) for x in (ours, theirs))
    return Compared(ours, theirs, 2 * int(mask.sum()), magnitude, dtype)


def per_token(x: Tensor, batch: Rollouts) -> Tensor:
    """One number per row at each of its tokens."""
    return x.unsqueeze(-1).expand(batch.mask.shape)


def remax(draw: Draw) -> Iterator[Compared]:
    """Where the mask is False verl leaves what is still to be earned there."""
    batch = rollouts(draw)
    rewards, baselines = token_level(batch, draw), batch.rewards.roll(1)
    theirs = upstream.advantages("remax", batch, token_level_rewards=rewards, reward_baselines=baselines)
    ours = kernel(row_of("remax"))(with_junk(rewards, batch.mask), baselines, batch.mask)
    largest = float(rewards.abs().max() + baselines.abs().max())
    yield Compared(ours, torch.where(batch.mask, theirs, 0.0), batch.mask.shape[-1], largest)


def reinforce_pp(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """Discounted returns, whitened."""
    (batch, dtype), gamma = whitenable(draw), draw.choose(GAMMAS, "gamma")
    batch = batch._replace(token_rewards=token_level(batch, draw))
    config = type("Config", (), {"gamma": gamma})
    theirs, returns = upstream.estimated("reinforce_plus_plus", batch, config=config)
    found = ours(row_of("reinforce_plus_plus"), batch, **params_of("reinforce_plus_plus", gamma=gamma))
    largest = float(batch.token_rewards.abs().max()) * batch.mask.shape[-1]
    yield whitened(found, theirs, returns, batch.mask, largest, dtype)


def reinforce_pp_baseline(ours: Ours, draw: Draw) -> Iterator[Compared]:
    """Less the mean of the group, whitened."""
    batch, dtype = whitenable(draw)
    theirs = upstream.advantages("reinforce_plus_plus_baseline", batch)
    found = ours(row_of("reinforce_plus_plus_baseline"), batch)
    raw = per_token(kernel("dr_grpo@verl")(batch.rewards, batch.ids), batch)
    largest = float(batch.rewards.abs().max())
    yield whitened(found, theirs, raw, batch.mask, largest, dtype)


def gdpo(draw: Draw) -> Iterator[Compared]:
    """Of one reward."""
    batch, dtype = whitenable(draw)
    dtype = dtype if not singletons(batch).any() else FLOAT32
    theirs = upstream.advantages("gdpo", batch)
    ours = kernel(row_of("gdpo"))(batch.rewards.unsqueeze(1), batch.ids, lengths=lengths(batch))
    raw = per_token(kernel("grpo@verl")(batch.rewards, batch.ids), batch)
    largest = max(precision(batch, batch.ids == i, 1e-6) for i in batch.ids.unique())
    yield whitened(per_token(ours, batch), theirs, raw, batch.mask, largest, dtype)


def gdpo_of_two(draw: Draw) -> Iterator[Compared]:
    """verl puts a component at the last attended token, which is masked where a tool wrote it."""
    weights = draw.choose([None, [1.0, 0.25]], "gdpo_reward_weights")
    batch, _ = whitenable(draw, min_group=2)
    g = torch.Generator().manual_seed(draw.integer(0, 99, "components"))
    components = torch.randn(len(batch.ids), 2, generator=g)
    ones = torch.ones(batch.mask.shape, dtype=torch.int64)
    theirs = upstream.advantages(
        "gdpo",
        batch,
        config={"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": weights},
        non_tensor_batch={"format": components[:, 0].numpy(), "accuracy": components[:, 1].numpy()},
        batch={"prompts": ones[:, :1], "attention_mask": torch.cat([ones[:, :1], ones], 1)},
    )
    option = {} if weights is None else {"component_weights": torch.tensor(weights, dtype=FLOAT64)}
    ours = kernel(row_of("gdpo"))(components.to(FLOAT64), batch.ids, lengths=lengths(batch), **option)
    scaled = [batch._replace(rewards=components[:, k].to(FLOAT64)) for k in (0, 1)]
    largest = sum(max(precision(b, b.ids == i, 1e-6) for i in b.ids.unique()) for b in scaled)
    normal = [kernel("grpo@verl")(b.rewards, b.ids) for b in scaled]
    raw = per_token(normal[0] + (1.0 if weights is None else 0.25) * normal[1], batch)
    yield whitened(per_token(ours, batch), theirs, raw, batch.mask, largest, FLOAT32)


def gae(draw: Draw) -> Iterator[Compared]:
    """verl's algorithm.lam is 1.0; the row's too."""
    (batch, dtype), gamma = whitenable(draw), draw.choose(GAMMAS, "gamma")
    lam = draw.choose([None, 0.0, 0.95], "lam")
    rewards, mask = token_level(batch, draw), batch.mask
    g = torch.Generator().manual_seed(draw.integer(0, 99, "values"))
    values = torch.randn(mask.shape, generator=g, dtype=FLOAT64)
    theirs, targets = compute_gae_advantage_return(
        rewards, values, mask.long(), gamma, 1.0 if lam is None else lam
    )
    given = with_junk(rewards, mask), with_junk(values, mask), mask
    option: dict[str, Any] = {"gamma": gamma} | ({} if lam is None else {"lam": lam})
    ours = kernel(row_of("gae"), **params_of("gae", **option))(*given)
    raw = kernel(row_of("gae"), whiten=False, **option)(*given)
    largest = float(rewards.abs().max() + values.abs().max()) * mask.shape[-1]
    ours_targets, targets = (torch.where(mask, x, 0.0) for x in (raw + values, targets))
    yield Compared(ours_targets, targets, mask.shape[-1], largest, what="returns")
    yield whitened(ours, theirs, raw, mask, largest, dtype)


def prefixes(batch: Rollouts) -> Rollouts:
    """The same with as many unmasked tokens in each row, all of them at its beginning."""
    tokens = torch.arange(batch.mask.shape[-1])
    return batch._replace(mask=tokens < batch.mask.sum(-1, keepdim=True))


def token_baseline(name: str, draw: Draw) -> Iterator[Compared]:
    """With holes in the mask only as verl has it for tools, which counts tokens and not positions."""
    batch = rollouts(draw)
    batch = batch if name.startswith("tir") else prefixes(batch)
    rewards, mask = token_level(batch, draw), batch.mask
    g = torch.Generator().manual_seed(draw.integer(0, 99, "probabilities"))
    old, share, weights = torch.rand(3, *mask.shape, generator=g, dtype=FLOAT64)
    old = -0.05 - 4 * old
    given = {"old_log_probs": old, "sum_pi_squared": old.exp() ** 2 + share * (1 - old.exp()) ** 2}
    corrected = flag(draw, "rollout correction")
    theirs = upstream.advantages(
        name,
        batch,
        token_level_rewards=rewards,
        rollout_is_weights=weights if corrected else None,
        **given,
    )
    option = {"correction_weights": with_junk(weights, mask)} if corrected else {}
    junk = (with_junk(x, mask) for x in (rewards, *given.values()))
    ours = kernel(row_of(name))(*junk, batch.ids, mask, **option)
    # A weight is (1 - pi)^2 at least: of a likely token, what a difference from 1 leaves.
    largest = 1000 * float(rewards.abs().max()) * mask.shape[-1]
    yield Compared(ours, theirs, mask.numel(), largest, scale=largest / 1000)


COUNTS = "verl divides counts in float32"


def whitened_claims(ours: Ours) -> list[Claim]:
    """The claims about these advantages."""
    compared = {
        "reinforce_plus_plus": reinforce_pp,
        "reinforce_plus_plus_baseline": reinforce_pp_baseline,
    }
    return [claim(row_of(name), name, partial(one, ours), COUNTS) for name, one in compared.items()]


CLAIMS: list[Claim] = [
    claim(row_of("remax"), "remax", remax),
    *whitened_claims(by_kernel),
    claim(row_of("gdpo"), "gdpo", gdpo, COUNTS),
    claim(row_of("gdpo"), "gdpo", gdpo_of_two, "two rewards, which verl adds in float32"),
    claim(row_of("gae"), "gae", gae, COUNTS),
    *(claim(row_of(name), name, partial(token_baseline, name)) for name in TOKEN_BASELINES),
]
