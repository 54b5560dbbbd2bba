"""Aggregation: plain loops, an older verl's arithmetic, and the cut of a batch into micro-batches."""

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels import aggregation
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import token_batches

MODES = Mode.__args__
KERNELS = (
    *(aggregation.token_mean, aggregation.token_sum, aggregation.prompt_mean),
    *(aggregation.seq_mean_token_mean, aggregation.seq_mean_token_sum, aggregation.seq_mean_token_sum_norm),
)
LENGTH = 11  # of "seq-mean-token-sum-norm", longer than any drawn row


def facts(mask: Tensor) -> dict[str, Any]:
    """What only one mode needs: a constant length, and which rows share a prompt (every other one)."""
    return {"max_length": LENGTH, "group_ids": torch.arange(mask[..., :1].numel()) % 2 * 5 - 1}


@given(batch=token_batches())
def test_verl_before_0_7_1_does_not_divide_its_norm_by_sequences(batch: dict[str, Tensor]) -> None:
    """`@verl<0.7.1`, whose agg_loss of 2026-01 is the sum over rows, over the padded width."""
    x, mask = batch["logprobs"], batch["mask"]
    older, now = (
        reductions.kernel("aggregation", f"seq-mean-token-sum-norm@{upstream}", max_length=x.shape[-1])
        for upstream in ("verl<0.7.1", "verl")
    )
    older, now = older(with_junk(x, mask), mask), now(x, mask)
    assert_parity(older, (x * mask).sum() / x.shape[-1], terms=x.numel(), magnitude=float(x.abs().max()))
    rows = max(1, int(mask.any(-1).sum()))
    assert_parity(older, now * rows, terms=x.numel(), magnitude=rows * float(x.abs().max()))


@given(batch=token_batches())
def test_a_mode_by_its_own_name_is_that_of_aggregate(batch: dict[str, Tensor]) -> None:
    x, mask = batch["logprobs"], batch["mask"]
    rows = of_kind(losses(), "aggregation")
    assert tuple(sorted(rows)) == tuple(sorted(MODES))
    for mode, row in rows.items():
        given = {name: value for name, value in facts(mask).items() if name in (*row.needs, *row.parameters)}
        assert row.kernel() in KERNELS and row.kernel().__name__ == mode.replace("-", "_")
        assert torch.equal(row.kernel()(x, mask, **given), aggregate(x, mask, mode, **given))


def loop(x: Tensor, mask: Tensor, mode: str, counts: dict[str, float], group_ids: list[int]) -> float:
    """The docstring of `aggregate`, as loops; `counts` are the denominators that are not counted here."""
    rows = [
        [v for v, counts_ in zip(values, kept, strict=True) if counts_]
        for values, kept in zip(x.tolist(), mask.tolist(), strict=True)
    ]
    if mode == "token-sum":
        return math.fsum(map(math.fsum, rows))
    if mode == "token-mean":
        return math.fsum(map(math.fsum, rows)) / counts.get("num_tokens", max(1, sum(map(len, rows))))
    if mode == "prompt-mean":
        prompts = {
            g: [v for row, h in zip(rows, group_ids, strict=True) if h == g for v in row] for g in group_ids
        }
        means = [math.fsum(values) / max(len(values), 1) for values in prompts.values()]
        return math.fsum(means) / counts.get("num_prompts", max(1, len(prompts)))
    per_row = {
        "seq-mean-token-sum": lambda row: math.fsum(row),
        "seq-mean-token-mean": lambda row: math.fsum(row) / max(len(row), 1),
        "seq-mean-token-sum-norm": lambda row: math.fsum(row) / LENGTH,
    }[mode]
    return math.fsum(map(per_row, rows)) / counts.get("num_sequences", max(1, sum(map(bool, rows))))


@pytest.mark.parametrize("mode", MODES)
@given(batch=token_batches())
def test_aggregate_equals_loops(mode: Mode, batch: dict[str, Tensor]) -> None:
    x, mask = batch["logprobs"], batch["mask"]
    scale, given = {"terms": x.numel(), "magnitude": float(x.abs().max())}, facts(mask)
    for counts in ({}, {"num_tokens": 40, "num_sequences": torch.tensor(7), "num_prompts": 3}):
        ours = aggregate(with_junk(x, mask), mask, mode, **given, **counts)
        numbers = {name: int(count) for name, count in counts.items()}
        wanted = loop(x, mask, mode, numbers, given["group_ids"].tolist())
        assert_parity(ours, x.new_tensor(wanted), **scale)


@pytest.mark.parametrize("mode", MODES)
@given(batch=token_batches(), parts=st.sampled_from([1, 2, 4]))
def test_cut_into_micro_batches_leaves_the_gradient_alone(
    mode: Mode, batch: dict[str, Tensor], parts: int
) -> None:
    x, mask = batch["logprobs"].requires_grad_(), batch["mask"]
    given = facts(mask)
    (expected,) = torch.autograd.grad(aggregate(x.square(), mask, mode, **given), x)
    whole = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "max_length": LENGTH}
    whole["num_prompts"] = len(given["group_ids"].unique())
    same = given["group_ids"].unsqueeze(0) == given["group_ids"].unsqueeze(1)
    prompt_tokens = (same * mask.sum(-1)).sum(-1)  # a prompt's rollouts may lie in different parts
    for rows in torch.arange(len(x)).chunk(parts):
        part = {"group_ids": given["group_ids"][rows], "prompt_tokens": prompt_tokens[rows]}
        aggregate(x[rows].square(), mask[rows], mode, **whole, **part).backward()
    assert_parity(x.grad, expected, terms=1)


@pytest.mark.parametrize("mode", MODES)
@given(batch=token_batches(max_rows=1))
def test_packed_sequence_equals_a_padded_row(mode: Mode, batch: dict[str, Tensor]) -> None:
    x, mask = batch["logprobs"], batch["mask"]
    packed = aggregate(x[0], mask[0], mode, **facts(mask[0]))
    assert torch.equal(packed, aggregate(x, mask, mode, **facts(mask)))


@pytest.mark.parametrize("mode", MODES)
def test_empty_batch_is_zero_whatever_count_is_passed(mode: Mode) -> None:
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for zero in (None, 0, 0.0, torch.tensor(0)):
        counts = {"num_tokens": zero, "num_sequences": zero, "num_prompts": zero}
        loss = aggregate(x, mask, mode, **counts, **facts(mask))
        assert loss == 0
        loss.backward()
        assert not x.grad.any()


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_reduced_in_float32(mode: Mode) -> None:
    x = torch.full((3, 500), 0.1, dtype=torch.bfloat16)
    mask = torch.ones(3, 500, dtype=torch.bool)
    loss = aggregate(x, mask, mode, **facts(mask))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, aggregate(x.float(), mask, mode, **facts(mask)))


def test_missing_constant_and_unknown_mode_are_errors_that_name_the_remedy() -> None:
    x, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="pass max_length"):
        aggregate(x, mask, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="pass group_ids"):
        aggregate(x, mask, "prompt-mean")
    unchecked = inspect.unwrap(aggregate)  # as users call it: without the annotations' own check
    with pytest.raises(ValueError, match="known: token-mean, token-sum"):
        unchecked(x, mask, "sequence-mean")


def test_rows_without_an_unmasked_token_count_only_if_asked() -> None:
    x = torch.ones(3, 2, dtype=torch.float64)
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert aggregate(x, mask, "seq-mean-token-mean") == 1  # verl
    assert aggregate(x, mask, "seq-mean-token-mean", num_sequences=3) == 2 / 3  # TRL


def test_a_length_below_one_counts_as_one() -> None:
    """As every denominator: 0 would make the loss infinite, and -3 turn its sign."""
    x, mask = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool)
    for length in (1, 0, 0.5, -3, -math.inf):
        assert aggregate(x, mask, "seq-mean-token-sum-norm", max_length=length) == 3
        assert aggregation.seq_mean_token_sum_norm(x, mask, max_length=length) == 3
    for count in (0, -2, 0.5):
        assert aggregate(x, mask, "token-mean", num_tokens=count) == 6
        assert aggregate(x, mask, "seq-mean-token-sum", num_sequences=count) == 6
