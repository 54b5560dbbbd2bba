"""Where numbers run out, over every loss per token: overflow, -inf, one token, no token, half precision."""

import math

import pytest
import torch
from torch import Tensor

from composer_plugins.catalogue import Loss
from composer_plugins.inputs import INPUTS, TOKENS, TOP_K, VOCAB
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_all_gradients
from composer_plugins.testing.inputs import Batch, draw, float_tensors, tensors
from composer_plugins.testing.settings import TRAINED, Setting
from parity_tests.support.every import Exceptions, each, holds, stale

COUNTS_THE_VOCABULARY: Exceptions = dict.fromkeys(
    ("divergence-adaptive_kl@taid", "divergence-adaptive_kl(weights='taid')"),
    "reads a mark by rank as one by position, as upstream does",
)

every_token_loss = each("policy", "divergence", "kl")
everything_per_token = each("policy", "divergence", "kl", "correction")
every_divergence = each("divergence")


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([COUNTS_THE_VOCABULARY])


def assert_finite(setting: Setting, batch: Batch, what: str) -> None:
    """Value and gradient."""
    loss, gradients = value_and_gradients(setting, batch)
    assert loss.isfinite().all(), f"{what}: loss {loss.flatten().tolist()}"
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), f"{what}: gradient of {name} {gradient.flatten().tolist()}"


@everything_per_token
@pytest.mark.parametrize(
    ("dtype", "far"),  # just below and far above where exp overflows: 88.7 and 709.8
    [(torch.float32, 88.0), (torch.float32, 1e4), (torch.float64, 709.0), (torch.float64, 1e4)],
)
def test_overflowing_log_ratios_give_a_finite_loss_and_gradient(
    row: Loss, dtype: torch.dtype, far: float
) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, unmasked=1.0, spread=0.0, dtype=dtype)
        names = [name for name in batch if name.endswith("logprobs") and INPUTS[name].shape == TOKENS]
        if "advantages" in batch:
            batch["advantages"] = batch["advantages"].sign() * 5
        near = torch.full_like(batch["mask"], -0.1, dtype=dtype)
        for moved in [*([name] for name in names), names[1:]]:  # one at a time, then all but the policy's
            for signs in (near * far * 10, torch.where(torch.arange(4)[:, None] < 2, near, near * far * 10)):
                given = {name: signs if name in moved else near for name in names}
                assert_finite(setting, batch | given, f"{moved} at -{far:g}")

    holds(row, check)


@every_token_loss
@pytest.mark.parametrize("scale", [1e-30, 1e6, 1e20])
def test_advantages_of_any_size_give_a_finite_loss_and_gradient(row: Loss, scale: float) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, dtype=torch.float32)
        if "advantages" in batch:
            assert_finite(setting, batch | {"advantages": batch["advantages"] * scale}, f"A * {scale:g}")

    holds(row, check)


@every_token_loss
def test_batch_without_an_unmasked_token_gives_zero_with_a_graph(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting)
        for junk in (None, torch.nan, torch.inf):
            given = {
                n: x if junk is None else torch.full_like(x, junk) for n, x in float_tensors(batch).items()
            }
            mask = torch.zeros_like(batch["mask"])
            empty = with_all_gradients(batch | given | {"mask": mask})
            total = aggregate(setting.result(empty), mask, "token-mean")
            assert total == 0 and total.grad_fn is not None
            total.backward()
            for name in setting.trained:
                assert empty[name].grad is not None and not empty[name].grad.any()

    holds(row, check)


@everything_per_token
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_before_anything_else(row: Loss, dtype: torch.dtype) -> None:
    def check(setting: Setting) -> None:
        half = draw(setting, spread=0.5, dtype=dtype)
        single = half | {name: x.float() for name, x in float_tensors(half).items()}
        ours, wanted = value_and_gradients(setting, half), value_and_gradients(setting, single)
        assert ours[0].dtype == torch.float32
        assert torch.equal(ours[0], wanted[0]), "not the float32 result on the same numbers"
        for name, gradient in ours[1].items():
            assert gradient.dtype == dtype
            assert_parity(gradient, wanted[1][name], terms=1, dtype=dtype, what=name)

    holds(row, check)


@everything_per_token
def test_float32_is_close_to_float64_on_the_same_numbers(row: Loss) -> None:
    def check(setting: Setting) -> None:
        single = draw(setting, 11, dtype=torch.float32)
        double = single | {name: x.double() for name, x in float_tensors(single).items()}
        ours, wanted = value_and_gradients(setting, single), value_and_gradients(setting, double)
        # A log ratio cancels: its rounding is that of the log-probabilities, and a slope magnifies it.
        magnitude = 10 * max(1.0, float(wanted[0].abs().max()))
        assert_parity(ours[0], wanted[0], terms=7, dtype=torch.float32, magnitude=magnitude)
        for name, gradient in ours[1].items():
            largest = 10 * max(1.0, float(wanted[1][name].abs().max()))
            assert_parity(
                gradient, wanted[1][name], terms=7, dtype=torch.float32, magnitude=largest, what=name
            )

    holds(row, check)


def over_vocabulary(setting: Setting) -> list[str]:
    return [name for name in setting.inputs if INPUTS[name].shape == VOCAB]


def forbid(batch: Batch, names: list[str], entry: int = -1) -> Batch:
    def one(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., entry] = -math.inf
        return x

    return batch | {name: one(batch[name]) for name in names}


@every_divergence
def test_entry_that_is_impossible_on_both_sides_contributes_nothing(row: Loss) -> None:
    def check(setting: Setting) -> None:
        names = over_vocabulary(setting)
        batch = draw(setting)
        # The last entry is the least likely of the teacher's: no top-k holds it.
        for name in names:
            batch[name][..., -1] = -20.0
        batch = redraw_top_k(setting, batch)
        without = batch | {name: batch[name][..., :-1] for name in names}
        ours, wanted = (
            value_and_gradients(setting, forbid(batch, names)),
            value_and_gradients(setting, without),
        )
        assert_parity(ours[0], wanted[0], terms=7)
        for name in ours[1]:
            gradient = ours[1][name]
            if name in names:
                assert not gradient[..., -1].any(), "a gradient reaches the impossible entry"
                gradient = gradient[..., :-1]
            assert_parity(gradient, wanted[1][name], terms=7, what=name)

    holds(row, check, COUNTS_THE_VOCABULARY)


def redraw_top_k(setting: Setting, batch: Batch) -> Batch:
    """The batch, its top-k those of its teacher's logits, or of six entries where it has none."""
    if "teacher_topk_ids" not in setting.inputs:
        return batch
    g = torch.Generator().manual_seed(9)
    shape = batch["teacher_topk_ids"].shape
    logits = torch.randn(*shape[:-1], 6, generator=g, dtype=torch.float64)
    top = batch.get("teacher_logits", logits)[..., :6].log_softmax(-1).topk(shape[-1], -1)
    found = {"teacher_topk_logprobs": top.values, "teacher_topk_ids": top.indices}
    return batch | {name: x for name, x in found.items() if name in batch}


@every_divergence
def test_entry_that_is_impossible_on_one_side_is_never_nan(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for name in over_vocabulary(setting):
            batch = draw(setting)
            loss = setting.result(forbid(batch, [name], entry=0))
            assert not loss.isnan().any(), f"-inf in {name}: {loss.flatten().tolist()}"
            assert not loss[~batch["mask"]].any()

    holds(row, check)


@every_divergence
def test_vocabulary_of_one_token_gives_zero(row: Loss) -> None:
    def check(setting: Setting) -> None:
        if over_vocabulary(setting):
            batch = draw(setting, vocab=1)
            loss, gradients = value_and_gradients(setting.within(1), batch)
            assert_parity(loss, torch.zeros_like(loss), terms=1, magnitude=1.0)
            for name, gradient in gradients.items():
                zero = torch.zeros_like(gradient)
                assert_parity(gradient, zero, terms=1, magnitude=1.0, what=name)

    holds(row, check)


@every_divergence
def test_logits_of_any_size_give_no_nan(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for scale in (1e-6, 1e2, 1e4):
            batch = draw(setting, dtype=torch.float32)
            moved = {name: batch[name] * scale for name in over_vocabulary(setting)}
            if moved:
                assert_finite(setting, batch | moved, f"logits * {scale:g}")

    holds(row, check)


def test_the_trained_inputs_are_inputs() -> None:
    assert set(INPUTS) >= TRAINED


@everything_per_token
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_a_batch_of_no_rows_or_no_tokens_gives_as_many_losses(row: Loss, shape: tuple[int, int]) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, unmasked=1.0)
        per_token = (TOKENS, VOCAB, TOP_K)
        none = {
            n: x[: shape[0], : shape[1]] for n, x in tensors(batch).items() if INPUTS[n].shape in per_token
        }
        loss, gradients = value_and_gradients(setting, batch | none)
        assert loss.shape == shape
        assert all(gradient.shape[:2] == shape for gradient in gradients.values())

    holds(row, check)
