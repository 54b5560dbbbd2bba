"""Properties of every advantage: ids and order of groups, masking, no gradient, 0 for equal rewards."""

import pytest
import torch
from torch import Tensor

from composer_plugins.catalogue import Loss
from composer_plugins.inputs import INPUTS, ROWS, TOKENS
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import with_all_gradients
from composer_plugins.testing.inputs import (
    Batch,
    draw,
    expand_mask,
    float_tensors,
    select_rows,
    tensors,
    with_junk,
)
from composer_plugins.testing.settings import Setting
from parity_tests.support.every import Exceptions, each, holds, stale

SIZE = 9
WHITENED = "normalised over the batch"
# The advantage of a row depends on rows of other groups.
BATCH_GLOBAL: Exceptions = {
    "advantage-grpo(scale='batch')": WHITENED,
    "advantage-reinforce_pp": WHITENED,
    "advantage-reinforce_pp_baseline": WHITENED,
    "advantage-gdpo": WHITENED,
    "advantage-gae": WHITENED,
}

every_advantage = each("advantage")


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([BATCH_GLOBAL])


def scale(setting: Setting, batch: Batch) -> dict[str, float]:
    """A tolerance for sums over the batch, divided by a deviation that may be small."""
    return {"terms": 4 * SIZE, "magnitude": max(1.0, float(setting.result(batch).abs().max()))}


@every_advantage
@pytest.mark.parametrize("seed", range(3))
def test_groups_may_have_any_ids_and_rows_any_order(row: Loss, seed: int) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, seed, size=SIZE)
        wanted = setting.result(batch)
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
        shuffled = select_rows(batch, order)
        assert_parity(setting.result(shuffled), wanted[order], **scale(setting, batch))
        if "group_ids" in batch:
            renamed = batch | {"group_ids": 1_000_003 - 17 * batch["group_ids"]}
            assert_parity(setting.result(renamed), wanted, **scale(setting, batch))

    holds(row, check)


@every_advantage
@pytest.mark.parametrize("seed", range(3))
def test_rows_and_tokens_that_are_masked_get_zero_and_count_nowhere(row: Loss, seed: int) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, seed, size=SIZE)
        if "mask" not in batch:
            return
        mask = batch["mask"]
        alike = {
            name: x
            for name, x in float_tensors(batch).items()
            if INPUTS[name].shape in (ROWS, TOKENS, "[rows, components]")
            and x.shape[: mask.dim()] == mask.shape
        }
        dirty = batch | {name: with_junk(x, expand_mask(mask, x)) for name, x in alike.items()}
        ours = setting.result(dirty)
        assert torch.equal(ours, setting.result(batch)), "what is masked has an influence"
        assert not ours[~mask].any(), "an advantage where masked"
        if mask.dim() == 1:
            kept = select_rows(batch, mask.nonzero().squeeze(1))
            assert_parity(ours[mask], setting.result(kept), **scale(setting, batch))

    holds(row, check)


@every_advantage
def test_groups_know_nothing_of_each_other(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=SIZE)
        # Without groups, a row is one.
        mine = (
            batch["group_ids"] == batch["group_ids"][0] if "group_ids" in batch else torch.arange(SIZE) == 0
        )
        moved = {
            name: torch.where(expand_mask(mine, x), x, 3 * x + 1)
            for name, x in float_tensors(batch).items()
            if INPUTS[name].shape != "[components]"
        }
        assert mine.any() and not mine.all()
        assert_parity(setting.result(batch | moved)[mine], setting.result(batch)[mine], terms=SIZE)

    holds(row, check, BATCH_GLOBAL)


@every_advantage
def test_nothing_has_a_gradient(row: Loss) -> None:
    def check(setting: Setting) -> None:
        assert not setting.result(with_all_gradients(draw(setting))).requires_grad

    holds(row, check)


@every_advantage
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_unmasked_reward_that_is_not_finite_is_seen_in_its_own_row(row: Loss, value: float) -> None:
    def check(setting: Setting) -> None:
        for name, x in float_tensors(draw(setting)).items():
            batch = draw(setting, size=SIZE, unmasked=1.0)
            if INPUTS[name].shape == "[components]":
                continue
            poisoned = batch[name].clone()
            poisoned[2].fill_(value) if x.dim() == 1 else poisoned[2, -1].fill_(value)
            found = setting.result(batch | {name: poisoned})[2]
            hidden = ~found.isnan() if value != value else found.isfinite()
            assert not hidden.all(), f"{value} in {name} is hidden: {found}"

    holds(row, check)


@every_advantage
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [0.1, 0.0, -1 / 3, 1e-30, 1e6 + 0.1, 1e30])
def test_equal_rewards_have_no_advantage_at_all(row: Loss, dtype: torch.dtype, reward: float) -> None:
    def check(setting: Setting) -> None:
        if setting.params.get("singleton") == "raw":
            return  # a group of one gets its reward
        for size in (1, 3, 8, 30):
            batch = draw(setting, size=size, unmasked=0.7 if size > 3 else 1.0, dtype=dtype)
            equal = {n: torch.full_like(x, reward) for n, x in float_tensors(batch).items() if "reward" in n}
            if "baselines" in batch:  # a baseline of its own: what the row earns
                equal = {n: torch.zeros_like(x) for n, x in equal.items()}
                equal["token_rewards"][:, 0] = equal["baselines"] = torch.full((size,), reward, dtype=dtype)
                batch["mask"] = torch.arange(batch["mask"].shape[1]).expand(batch["mask"].shape) == 0
            if "values" in batch:
                equal = equal_critic(batch, reward)
            if setting.loss.name == "reinforce_pp":
                equal["token_rewards"] = torch.zeros_like(batch["token_rewards"])
                equal["token_rewards"][:, -1] = reward
                batch["mask"] = torch.ones_like(batch["mask"])
            ours = setting.result(batch | equal)
            assert not ours.any(), f"{size} rows: {ours.flatten().tolist()}"

    holds(row, check)


def equal_critic(batch: Batch, reward: float) -> dict[str, Tensor]:
    """A critic that is right: nothing is earned beyond what it expects."""
    rewards = torch.zeros_like(batch["token_rewards"])
    return {"token_rewards": rewards, "values": torch.zeros_like(rewards)}


@every_advantage
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_before_anything_else(row: Loss, dtype: torch.dtype) -> None:
    def check(setting: Setting) -> None:
        half = draw(setting, size=SIZE, dtype=dtype)
        single = half | {name: x.float() for name, x in float_tensors(half).items()}
        assert setting.result(half).dtype == torch.float32
        assert torch.equal(setting.result(half), setting.result(single))
        double = half | {name: x.double() for name, x in float_tensors(half).items()}
        assert setting.result(double).dtype == torch.float64

    holds(row, check)


@every_advantage
def test_masked_batches_and_groups_of_one_are_finite(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for size in (1, 2, 5):
            batch = draw(setting, size=size)
            if "group_ids" in batch:
                batch["group_ids"] = torch.arange(size)
            assert setting.result(batch).isfinite().all()
            if "mask" in batch:
                empty = batch | {"mask": torch.zeros_like(batch["mask"])}
                assert not setting.result(empty).any()

    holds(row, check)


@pytest.mark.usefixtures("annotation_checks")
@every_advantage
def test_integer_rewards_and_float_ids_are_refused_where_types_are_checked(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting)
        wrong = [(name, x.long()) for name, x in float_tensors(batch).items()]
        wrong += [(name, tensors(batch)[name].double()) for name in ("mask", "group_ids") if name in batch]
        for name, x in wrong:
            with pytest.raises(Exception, match="(?i)type-check|violates|beartype"):
                setting.result(batch | {name: x})

    holds(row, check)
