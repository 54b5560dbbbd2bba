"""Laws of advantages: ids and order of groups, masking, NaN, groups of one, long rows."""

from itertools import product
from typing import Any

import torch

from composer_plugins.losses.inputs import INPUTS, ROWS, TOKENS
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import Batch, expand_mask, float_tensors, select_rows, with_junk
from composer_plugins.testing.law import NotApplicable, law, numbers, require, require_equal
from composer_plugins.testing.settings import Setting

SIZE, SEEDS = 16, range(3)
LONG = 40


def _tolerance(setting: Setting, batch: Batch) -> dict[str, Any]:
    """A tolerance for sums over the batch, divided by a deviation that may be small."""
    return {"terms": 4 * SIZE, "magnitude": max(1.0, float(setting.result(batch).abs().max()))}


@law(
    "advantage",
    cause="groups that are taken to be contiguous, of equal size, or numbered from 0: use kernels.groups, "
    "which takes any ids in any order",
)
def groups_may_have_any_ids_and_rows_any_order(setting: Setting) -> None:
    """Another order of the rows, and other ids of the groups, give each row the same advantage."""
    for seed in SEEDS:
        batch = setting.draw(seed, size=SIZE)
        wanted = setting.result(batch)
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
        shuffled = select_rows(batch, order)
        tolerance = _tolerance(setting, batch)
        assert_parity(setting.result(shuffled), wanted[order], **tolerance, what="another order of the rows")
        if "group_ids" in batch:
            renamed = batch | {"group_ids": 1_000_003 - 17 * batch["group_ids"]}
            assert_parity(setting.result(renamed), wanted, **tolerance, what="other ids of the groups")


@law("advantage", cause="a product with the mask, or a count of all rows or columns: count mask.sum()")
def masked_rows_and_tokens_have_no_influence(setting: Setting) -> None:
    """What is masked gets 0 and counts nowhere, whatever it holds."""
    if "mask" not in setting.inputs:
        raise NotApplicable("it has no mask")
    for seed in SEEDS:
        batch = setting.draw(seed, size=SIZE)
        mask = batch["mask"]
        alike = {
            name: x
            for name, x in float_tensors(batch).items()
            if INPUTS[name].shape in (ROWS, TOKENS, "[rows, components]")
            and x.shape[: mask.dim()] == mask.shape
        }
        dirty = batch | {name: with_junk(x, mask) for name, x in alike.items()}
        ours = setting.result(dirty)
        require_equal(ours, setting.result(batch), "the advantage depends on what is masked")
        require(not ours[~mask].any(), "the advantage is not 0 where masked")
        if mask.dim() == 1:
            kept = select_rows(batch, mask.nonzero().squeeze(1))
            wanted = setting.result(kept)
            assert_parity(ours[mask], wanted, **_tolerance(setting, batch), what="without the masked rows")


@law(
    "advantage",
    cause="a statistic of the whole batch: declare it as an exception of the row, with the reason",
)
def groups_have_no_influence_on_each_other(setting: Setting) -> None:
    """Other rewards in other groups leave the advantages of a group as they are."""
    batch = setting.draw(size=SIZE)
    # Without groups, a row is one.
    mine = batch["group_ids"] == batch["group_ids"][0] if "group_ids" in batch else torch.arange(SIZE) == 0
    moved = {
        name: torch.where(expand_mask(mine, x), x, 3 * x + 1)
        for name, x in float_tensors(batch).items()
        if INPUTS[name].shape != "[components]"
    }
    found, wanted = setting.result(batch | moved)[mine], setting.result(batch)[mine]
    assert_parity(found, wanted, terms=SIZE, what="the first group, with other rewards in the others")


@law("advantage", cause="nan_to_num, or a comparison that is False for NaN", finding="unsafe")
def unmasked_rewards_that_are_not_finite_are_seen_in_their_row(setting: Setting) -> None:
    """A reward of NaN or an infinity is seen in the advantage of its row."""
    for value, row in product((torch.nan, torch.inf, -torch.inf), (2, SIZE - 2)):
        for name in float_tensors(setting.draw()):
            batch = setting.draw(size=SIZE, unmasked=1.0)
            if INPUTS[name].shape == "[components]":
                continue
            poisoned = batch[name].clone()
            poisoned[row].fill_(value) if poisoned.dim() == 1 else poisoned[row, -1].fill_(value)
            found = setting.result(batch | {name: poisoned})[row]
            hidden = ~found.isnan() if value != value else found.isfinite()
            require(not hidden.all(), f"{value} in {name!r} is hidden: {numbers(found)}")


@law(
    "advantage",
    cause="a standard deviation of one number (ddof 1 gives NaN), or a division by a count of 0: give a "
    "group of one the advantage 0",
)
def masked_batches_and_groups_of_one_are_finite(setting: Setting) -> None:
    """Groups of one rollout give finite advantages, and a batch that is masked out gives 0."""
    for size in (1, 2, 5):
        batch = setting.draw(size=size)
        if "group_ids" in batch:
            batch["group_ids"] = torch.arange(size)
        found = setting.result(batch)
        require(found.isfinite().all(), f"{size} groups of one: {numbers(found)}")
        if "mask" in batch:
            empty = setting.result(batch | {"mask": torch.zeros_like(batch["mask"])})
            require(not empty.any(), f"a batch that is masked out: {numbers(empty)}")


@law("advantage", cause="a scan of a fixed number of steps: its distance must grow with the number of tokens")
def last_reward_is_seen_from_every_token(setting: Setting) -> None:
    """If the reward of the last of 6 tokens reaches the first, that of the last of 40 reaches all 40."""
    if "token_rewards" not in setting.inputs or "mask" not in setting.inputs:
        raise NotApplicable("it has no rewards per token")

    def effect(tokens: int) -> torch.Tensor:
        batch = setting.draw(size=3, tokens=tokens, unmasked=1.0)
        moved = batch["token_rewards"].clone()
        moved[0, -1] += 1.0
        return setting.result(batch | {"token_rewards": moved})[0] - setting.result(batch)[0]

    if not effect(6).all():
        raise NotApplicable("a reward does not reach every token before it")
    blind = (effect(LONG) == 0).nonzero().flatten().tolist()
    require(not blind, f"of {LONG} tokens, these do not see the reward of the last: {blind}")


@law(
    "advantage",
    cause="a sign, a square, or a baseline that is not that of the group",
)
def higher_reward_has_no_smaller_advantage(setting: Setting) -> None:
    """A higher reward alone gives no smaller advantage, and equal rewards of a group give 0.

    The rows are equal but for their rewards. With groups, the rows of one group are compared. A higher
    baseline alone gives no larger advantage.
    """
    given = [name for name in ("rewards", "reward_components", "token_rewards") if name in setting.inputs]
    if not given:
        raise NotApplicable("it has no rewards")
    drawn = setting.draw(size=SIZE, unmasked=1.0)
    batch = select_rows(drawn, torch.zeros(SIZE, dtype=torch.int64))
    reward = drawn[given[0]].reshape(SIZE, -1)[:, -1]  # the same of every component and at every token
    for name in given:
        batch[name] = reward.reshape(-1, *[1] * (drawn[name].dim() - 1)).expand_as(drawn[name]).clone()
    if "group_ids" in batch:
        batch["group_ids"] = torch.arange(SIZE) // 4
    found = setting.result(batch).reshape(SIZE, -1)
    size = 4 if "group_ids" in batch else SIZE
    for rewards, advantages in zip(reward.split(size), found.split(size), strict=True):
        steps = advantages[rewards.argsort(stable=True)].diff(dim=0).amin(0)
        shown = f"rewards {numbers(rewards)} have the advantages {numbers(advantages[:, steps.argmin()])}"
        require((steps >= -1e-9 * advantages.abs().max()).all(), shown)
    if "baselines" in batch:
        same = {name: torch.full_like(batch[name], 0.3) for name in given}
        if "group_ids" in batch:
            batch["group_ids"] = torch.zeros_like(batch["group_ids"])
        found = setting.result(batch | same | {"baselines": drawn["baselines"]}).reshape(SIZE, -1)
        steps = found[drawn["baselines"].argsort()].diff(dim=0)
        shown = f"baselines {numbers(drawn['baselines'])} have the advantages {numbers(found)}"
        require((steps <= 1e-9 * found.abs().max()).all(), shown)
    elif "group_ids" in batch:
        equal = setting.result(batch | {name: torch.full_like(batch[name], 0.3) for name in given})
        require(equal.abs().max() < 1e-6, f"equal rewards have the advantages {numbers(equal)}")
