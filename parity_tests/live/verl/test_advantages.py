"""Every advantage estimator of the installed verl against our kernels, on drawn rollouts.

verl counts with integers and divides them in float32: Bessel's n / (n - 1) where it whitens, GPG's alpha.
Whitening is compared in float64 where n - 1 is a power of two, so that the quotient is exact, and at
float32's tolerance on any mask; alpha's rounding is undone.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.core_algos import compute_gae_advantage_return as verl_gae

from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from parity_tests.support.verl_facts import (
    FLOAT64,
    Rollouts,
    assert_complete,
    names,
    rollouts,
    row_kernel,
    verl_advantages,
    with_dialect,
)

NOT_COMPARED = dict.fromkeys(
    ("optimal_token_baseline", "tir_optimal_token_baseline"),
    "no kernel: it wants the sum of the squared probabilities of the vocabulary at each token",
)
COMPARED: set[str] = set()

examples = settings(max_examples=60)
GAMMAS = st.sampled_from([0.0, 0.9, 1.0])

# Of a group of one verl's loop divides by 1 + eps in float32.
SINGLETON_ROUNDING = float(torch.tensor(1.0) + 1e-6) / (1 + 1e-6)


def compares(*estimators: str) -> Callable[[Any], Any]:
    """Name the estimators of verl that a test compares."""
    COMPARED.update(estimators)
    return lambda test: test


def kernel(name: str, **params: Any) -> Callable[..., Tensor]:
    return row_kernel("advantage", name, **params)


def lengths(batch: Rollouts) -> Tensor:
    return batch.mask.sum(-1).to(FLOAT64)


def singletons(batch: Rollouts) -> Tensor:
    return (batch.ids == batch.ids.unsqueeze(1)).sum(0) == 1


def precision(batch: Rollouts, rows: Tensor, eps: float | None) -> float:
    """The largest term behind an advantage: a reward, over the group's deviation plus `eps`.

    A mean is as precise as the group's largest reward, and a division by a small deviation magnifies that.
    """
    rewards = batch.rewards[rows]
    divisor = 1.0 if eps is None or len(rewards) < 2 else min(1.0, float(rewards.std()) + eps)
    return float(rewards.abs().max()) / divisor


def assert_rows_equal(
    ours: Tensor,
    theirs: Tensor,
    batch: Rollouts,
    *,
    eps: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = FLOAT64,
) -> None:
    """Advantages per row against verl's per token, group by group; `eps` is added to a deviation."""
    __tracebackhide__ = True
    per_token = ours.unsqueeze(-1) * batch.mask
    for i in batch.ids.unique():
        group = batch.ids == i
        assert_parity(
            per_token[group],
            theirs[group],
            terms=2 * int(group.sum()),  # a mean, and a deviation
            magnitude=scale * precision(batch, group, eps),
            dtype=dtype,
        )


@compares("grpo")
@examples
@given(batch=rollouts())
def test_grpo_equals_verl(batch: Rollouts) -> None:
    ours = kernel("grpo@verl")(batch.rewards, batch.ids)
    rounded = torch.where(singletons(batch), ours / SINGLETON_ROUNDING, ours)
    assert_rows_equal(rounded, verl_advantages("grpo", batch), batch, eps=1e-6)


@compares("grpo_vectorized")
@examples
@given(batch=rollouts())
def test_grpo_equals_verl_vectorized_in_float32(batch: Rollouts) -> None:
    ours = kernel("grpo@verl")(batch.rewards, batch.ids)
    theirs = verl_advantages("grpo_vectorized", batch)
    assert_rows_equal(ours, theirs, batch, eps=1e-6, dtype=torch.float32)


@examples
@given(batch=rollouts())
def test_dr_grpo_equals_verl_without_the_deviation(batch: Rollouts) -> None:
    ours = kernel("dr_grpo@verl")(batch.rewards, batch.ids)
    for name, dtype in (("grpo", FLOAT64), ("grpo_vectorized", torch.float32)):
        theirs = verl_advantages(name, batch, norm_adv_by_std_in_grpo=False)
        assert_rows_equal(ours, theirs, batch, dtype=dtype)


@compares("rloo", "rloo_vectorized")
@examples
@given(batch=rollouts())
def test_rloo_equals_verl(batch: Rollouts) -> None:
    loop = kernel("rloo@verl")(batch.rewards, batch.ids)
    assert_rows_equal(loop, verl_advantages("rloo", batch), batch)
    vectorised = kernel("rloo@verl", singleton="zero")(batch.rewards, batch.ids)
    assert_rows_equal(vectorised, verl_advantages("rloo_vectorized", batch), batch)


@compares("opo")
@examples
@given(batch=rollouts())
def test_opo_equals_verl(batch: Rollouts) -> None:
    ours = kernel("opo@verl")(batch.rewards, batch.ids, lengths(batch))
    # Of a group without an unmasked token verl's baseline is 0 / 0.
    theirs = torch.where(batch.mask, verl_advantages("opo", batch), 0.0)
    assert_rows_equal(ours, theirs, batch)


def test_opo_of_a_group_without_an_unmasked_token_is_nan_in_verl_and_zero_here() -> None:
    rewards = torch.tensor([1.0, 2.0], dtype=FLOAT64)
    batch = Rollouts(rewards, rewards.unsqueeze(1), torch.tensor([0, 0]), torch.zeros(2, 1, dtype=torch.bool))
    assert verl_advantages("opo", batch).isnan().all()
    assert kernel("opo@verl")(batch.rewards, batch.ids, lengths(batch)).isfinite().all()


@compares("gpg")
@examples
@given(batch=rollouts(), f_norm=st.sampled_from([None, 0.5, 3.0]))
def test_gpg_equals_verl(batch: Rollouts, f_norm: float | None) -> None:
    option = {} if f_norm is None else {"f_norm": f_norm}
    count = max(1, int(batch.rewards.count_nonzero()))
    alpha = len(batch.rewards) / count
    rounding = float(len(batch.rewards) / torch.tensor(count)) / alpha  # an integer times 1 / count
    ours = kernel("gpg@verl", **option)(batch.rewards, batch.ids) * rounding
    theirs = verl_advantages("gpg", batch, **option)
    assert_rows_equal(ours, theirs, batch, scale=alpha / (f_norm or 1.0))


@compares("grpo_passk")
@examples
@given(batch=rollouts(min_group=2))
def test_pass_at_k_equals_verl(batch: Rollouts) -> None:
    scaled = kernel("pass_at_k@verl")(batch.rewards, batch.ids)
    theirs = verl_advantages("grpo_passk", batch, config={})
    assert_rows_equal(scaled, theirs, batch, eps=1e-6)
    ours = kernel("pass_at_k@verl", scale="none")(batch.rewards, batch.ids)
    theirs = verl_advantages("grpo_passk", batch, config={"norm_adv_by_std_in_grpo": False})
    assert_rows_equal(ours, theirs, batch)


@compares("remax")
@examples
@given(batch=rollouts(), data=st.data())
def test_remax_equals_verl(batch: Rollouts, data: st.DataObject) -> None:
    token_rewards, baselines = token_level(batch, data), batch.rewards.roll(1)
    theirs = verl_advantages("remax", batch, token_level_rewards=token_rewards, reward_baselines=baselines)
    ours = kernel("remax@verl")(with_junk(token_rewards, batch.mask), baselines, batch.mask)
    largest = float(token_rewards.abs().max() + baselines.abs().max())
    # Where the mask is False verl leaves what is still to be earned there.
    theirs = torch.where(batch.mask, theirs, 0.0)
    assert_parity(ours, theirs, terms=batch.mask.shape[-1], magnitude=largest)


def token_level(batch: Rollouts, data: st.DataObject) -> Tensor:
    """The row's reward at one token, or rewards everywhere, the masked tokens included."""
    if data.draw(st.booleans(), label="a reward per row"):
        return batch.token_rewards.clone()
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="token rewards"))
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
    return batch._replace(mask=mask), FLOAT64 if others & (others - 1) == 0 else torch.float32


def cut_to_a_power_of_two(batch: Rollouts) -> Rollouts:
    """As many unmasked tokens less, from the end, as make the count less one a power of two."""
    others = int(batch.mask.sum()) - 1
    wanted = 1 + (1 << (others.bit_length() - 1))
    live = (batch.mask.flatten().cumsum(0) <= wanted).view(batch.mask.shape)
    return batch._replace(mask=batch.mask & live)


@st.composite
def whitenable(draw: st.DrawFn, min_group: int = 1) -> tuple[Rollouts, torch.dtype]:
    """Rollouts with at least two unmasked tokens, and the precision in which verl whitens them."""
    batch, dtype = for_whitening(draw(rollouts(min_group=min_group)))
    if dtype != FLOAT64 and draw(st.booleans(), label="in float64"):
        batch, dtype = for_whitening(cut_to_a_power_of_two(batch))
        assert dtype == FLOAT64
    return batch, dtype


def assert_whitened_equal(
    ours: Tensor, theirs: Tensor, raw: Tensor, mask: Tensor, largest: float, dtype: torch.dtype
) -> None:
    """Per token; `largest` is the largest term of the `raw` advantages, which a small variance magnifies."""
    __tracebackhide__ = True
    divisor = float((raw[mask].var() + 1e-8).sqrt())
    assert_parity(
        torch.where(mask, ours, 0.0),
        torch.where(mask, theirs, 0.0),
        terms=2 * int(mask.sum()),
        magnitude=largest * (1 + largest / divisor) / divisor,
        dtype=dtype,
    )


@compares("reinforce_plus_plus")
@examples
@given(drawn=whitenable(), gamma=GAMMAS, data=st.data())
def test_reinforce_pp_equals_verl(
    drawn: tuple[Rollouts, torch.dtype], gamma: float, data: st.DataObject
) -> None:
    batch, dtype = drawn
    rewards = token_level(batch, data)
    config = type("Config", (), {"gamma": gamma})
    theirs, returns = ADV_ESTIMATOR_REGISTRY["reinforce_plus_plus"](
        token_level_rewards=rewards, response_mask=batch.mask.long(), config=config
    )
    ours = kernel("reinforce_pp@verl", gamma=gamma)(with_junk(rewards, batch.mask), batch.mask)
    largest = float(rewards.abs().max()) * batch.mask.shape[-1]
    assert_whitened_equal(ours, theirs, returns, batch.mask, largest, dtype)


@compares("reinforce_plus_plus_baseline")
@examples
@given(drawn=whitenable())
def test_reinforce_pp_baseline_equals_verl(drawn: tuple[Rollouts, torch.dtype]) -> None:
    batch, dtype = drawn
    theirs = verl_advantages("reinforce_plus_plus_baseline", batch)
    ours = kernel("reinforce_pp_baseline@verl")(batch.rewards, batch.ids, lengths(batch))
    raw = kernel("dr_grpo@verl")(batch.rewards, batch.ids).unsqueeze(-1).expand(batch.mask.shape)
    largest = float(batch.rewards.abs().max())
    per_token = ours.unsqueeze(-1).expand(batch.mask.shape)
    assert_whitened_equal(per_token, theirs, raw, batch.mask, largest, dtype)


@compares("gdpo")
@examples
@given(drawn=whitenable())
def test_gdpo_of_one_reward_equals_verl(drawn: tuple[Rollouts, torch.dtype]) -> None:
    batch, dtype = drawn
    theirs = verl_advantages("gdpo", batch)
    ours = kernel("gdpo@verl")(batch.rewards.unsqueeze(1), batch.ids, lengths=lengths(batch))
    assert_gdpo_equal(ours, theirs, batch, dtype if not singletons(batch).any() else torch.float32)


def assert_gdpo_equal(ours: Tensor, theirs: Tensor, batch: Rollouts, dtype: torch.dtype) -> None:
    __tracebackhide__ = True
    raw = kernel("grpo@verl")(batch.rewards, batch.ids).unsqueeze(-1).expand(batch.mask.shape)
    largest = max(precision(batch, batch.ids == i, 1e-6) for i in batch.ids.unique())
    per_token = ours.unsqueeze(-1).expand(batch.mask.shape)
    assert_whitened_equal(per_token, theirs, raw, batch.mask, largest, dtype)


@pytest.mark.parametrize("weights", [None, [1.0, 0.25]])
@examples
@given(drawn=whitenable(min_group=2), seed=st.integers(0, 99))
def test_gdpo_of_two_rewards_equals_verl_in_float32(
    weights: list[float] | None, drawn: tuple[Rollouts, torch.dtype], seed: int
) -> None:
    batch, _ = drawn
    g = torch.Generator().manual_seed(seed)
    components = torch.randn(len(batch.ids), 2, generator=g)
    # verl puts a component at the last attended token, which is masked where a tool wrote it.
    ones = torch.ones(batch.mask.shape, dtype=torch.int64)
    config = {"gdpo_reward_keys": ["format", "accuracy"], "gdpo_reward_weights": weights}
    theirs, _ = ADV_ESTIMATOR_REGISTRY["gdpo"](
        token_level_rewards=batch.token_rewards,
        response_mask=batch.mask.long(),
        index=names(batch.ids.tolist()),
        config=config,
        non_tensor_batch={"format": components[:, 0].numpy(), "accuracy": components[:, 1].numpy()},
        batch={"prompts": ones[:, :1], "attention_mask": torch.cat([ones[:, :1], ones], 1)},
    )
    option = {} if weights is None else {"component_weights": torch.tensor(weights, dtype=FLOAT64)}
    ours = kernel("gdpo@verl")(components.to(FLOAT64), batch.ids, lengths=lengths(batch), **option)
    scaled = [batch._replace(rewards=components[:, k].to(FLOAT64)) for k in (0, 1)]
    largest = sum(max(precision(b, b.ids == i, 1e-6) for i in b.ids.unique()) for b in scaled)
    normal = [kernel("grpo@verl")(b.rewards, b.ids) for b in scaled]
    raw = (normal[0] + (1.0 if weights is None else 0.25) * normal[1]).unsqueeze(-1).expand(batch.mask.shape)
    per_token = ours.unsqueeze(-1).expand(batch.mask.shape)
    assert_whitened_equal(per_token, theirs, raw, batch.mask, largest, torch.float32)


@compares("gae")
@examples
@given(drawn=whitenable(), gamma=GAMMAS, lam=st.sampled_from([None, 0.0, 0.95]), data=st.data())
def test_gae_equals_verl(
    drawn: tuple[Rollouts, torch.dtype], gamma: float, lam: float | None, data: st.DataObject
) -> None:
    batch, dtype = drawn
    rewards, mask = token_level(batch, data), batch.mask
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="values"))
    values = torch.randn(mask.shape, generator=g, dtype=FLOAT64)
    # verl's algorithm.lam is 1.0; the row's too.
    theirs, targets = verl_gae(rewards, values, mask.long(), gamma, 1.0 if lam is None else lam)
    inputs = with_junk(rewards, mask), with_junk(values, mask), mask
    option = {} if lam is None else {"lam": lam}
    ours = kernel("gae@verl", gamma=gamma, **option)(*inputs)
    raw = kernel("gae@verl", gamma=gamma, whiten=False, **option)(*inputs)
    largest = float(rewards.abs().max() + values.abs().max()) * mask.shape[-1]
    assert_parity(
        torch.where(mask, raw + values, 0.0),
        torch.where(mask, targets, 0.0),
        terms=mask.shape[-1],
        magnitude=largest,
    )
    assert_whitened_equal(ours, theirs, raw, mask, largest, dtype)


def one_group_of_four() -> Rollouts:
    rewards = torch.tensor([0.1, 0.0, 0.3, 0.7], dtype=FLOAT64)
    return Rollouts(
        rewards, rewards.unsqueeze(1), torch.zeros(4, dtype=torch.int64), torch.ones(4, 1, dtype=torch.bool)
    )


def test_verl_divides_counts_in_float32_and_ours_do_not() -> None:
    batch = one_group_of_four()
    off = {
        "gpg": kernel("gpg@verl")(batch.rewards, batch.ids),
        "reinforce_plus_plus_baseline": kernel("reinforce_pp_baseline@verl")(
            batch.rewards, batch.ids, lengths(batch)
        ),
    }
    for name, ours in off.items():
        error = (ours - verl_advantages(name, batch).squeeze(1)).abs().max()
        assert 1e-10 < float(error) < 1e-6, f"compare {name} in float64 whatever the counts"


def test_verl_rounds_one_plus_eps_of_a_group_of_one_and_ours_does_not() -> None:
    batch = one_group_of_four()._replace(ids=torch.arange(4))
    ours = kernel("grpo@verl")(batch.rewards, batch.ids)
    error = (ours - verl_advantages("grpo", batch).squeeze(1)).abs().max()
    assert 1e-10 < float(error) < 1e-6, "drop SINGLETON_ROUNDING"


def test_verl_leaves_something_where_the_mask_is_false_and_ours_do_not() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.5]], dtype=FLOAT64)
    values, mask = torch.tensor([[0.3, 0.2, 0.1]], dtype=FLOAT64), torch.tensor([[True, False, True]])
    baselines = torch.zeros(1, dtype=FLOAT64)
    remax, _ = ADV_ESTIMATOR_REGISTRY["remax"](rewards, baselines, mask.long())
    gae, _ = verl_gae(rewards, values, mask.long(), 1.0, 1.0)
    assert (remax * gae)[~mask].all()
    assert not kernel("remax@verl")(rewards, baselines, mask)[~mask].any()
    assert not kernel("gae@verl")(rewards, values, mask)[~mask].any()


def test_every_advantage_estimator_of_verl_is_compared_or_has_a_reason() -> None:
    assert_complete(ADV_ESTIMATOR_REGISTRY, COMPARED, NOT_COMPARED)


def test_every_row_with_a_dialect_of_verl_is_called_here() -> None:
    called = re.findall(r'kernel\("(\w+@verl)"', Path(__file__).read_text())
    assert {f"{loss.name}@verl" for loss in with_dialect("advantage")} == set(called)
