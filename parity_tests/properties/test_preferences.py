"""Properties of every preference loss: order and chunks of pairs, and no gradient in the reference."""

import pytest
import torch

from composer_plugins.catalogue import Loss
from composer_plugins.inputs import INPUTS, PAIRS, ROWS
from composer_plugins.plugins import losses
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_all_gradients
from composer_plugins.testing.inputs import draw, float_tensors, select_rows
from composer_plugins.testing.settings import TRAINED, Setting
from parity_tests.support.every import Exceptions, each, holds, stale

BATCH_GLOBAL: Exceptions = {
    "preference-aot": "the margins of the batch are sorted, and matched in that order",
    "preference-aot_unpaired": "the rewards of the batch are sorted, and matched in that order",
}
every_preference = each("preference")


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([BATCH_GLOBAL])
    flagged = {f"{row.kind}-{row.name}" for row in losses() if row.over_batch and row.kind == "preference"}
    assert flagged == set(BATCH_GLOBAL)


@every_preference
def test_pairs_may_come_in_any_order(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=6)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        loss, gradients = value_and_gradients(setting, batch)
        shuffled, shuffled_gradients = value_and_gradients(setting, select_rows(batch, order))
        assert_parity(shuffled, loss[order], terms=4)
        for name, gradient in gradients.items():
            assert_parity(shuffled_gradients[name], gradient[order], terms=4, what=name)

    holds(row, check, BATCH_GLOBAL)


@every_preference
def test_chunks_of_a_batch_are_the_batch(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=6)
        loss, gradients = value_and_gradients(setting, batch)
        for parts in (2, 3, 6):
            chunks = [
                value_and_gradients(setting, select_rows(batch, i)) for i in torch.arange(6).chunk(parts)
            ]
            assert_parity(torch.cat([chunk[0] for chunk in chunks]), loss, terms=4)
            for name, gradient in gradients.items():
                assert_parity(torch.cat([c[1][name] for c in chunks]), gradient, terms=4, what=name)

    holds(row, check, BATCH_GLOBAL)


@every_preference
def test_references_get_no_gradient_and_scores_get_one(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = with_all_gradients(draw(setting))
        result = setting(batch)
        result.loss.sum().backward()
        for name, x in float_tensors(batch).items():
            if name in TRAINED:
                assert x.grad is not None and x.grad.any(), f"no gradient reaches {name}"
            else:
                assert x.grad is None, f"a gradient reaches {name}"
        for name, metric in result.metrics.items():
            assert not metric.value.requires_grad, f"{name} carries a gradient"
            assert metric.where.dtype == torch.bool and metric.value.shape == metric.where.shape, name

    holds(row, check)


@every_preference
def test_nan_in_a_score_is_nan_in_its_pair_and_in_no_other(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=5)
        for name, x in float_tensors(batch).items():
            if INPUTS[name].shape not in (PAIRS, ROWS):
                continue
            poisoned = x.clone()
            poisoned[2] = torch.nan
            loss, gradients = value_and_gradients(setting, batch | {name: poisoned})
            seen = [loss[2], *(g[2] for g in gradients.values())]
            assert any(bool(s.isnan()) for s in seen), f"NaN in {name} is hidden"
            others = [loss[[0, 1, 3, 4]], *(g[[0, 1, 3, 4]] for g in gradients.values())]
            assert all(bool(s.isfinite().all()) for s in others), f"NaN in {name} reaches other pairs"

    holds(row, check, BATCH_GLOBAL)


@every_preference
@pytest.mark.parametrize("far", [1e2, 1e4, 1e6])
def test_scores_far_apart_give_a_finite_loss_and_gradient_in_float32(row: Loss, far: float) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=4, dtype=torch.float32)
        scores = [name for name in ("chosen", "rejected", "ref_chosen", "ref_rejected") if name in batch]
        scores += [name for name in ("scores", "ref_scores") if name in batch]
        for name in scores:
            moved = batch[name].clone()
            moved[:2] = -far
            loss, gradients = value_and_gradients(setting, batch | {name: moved})
            assert loss.isfinite().all(), f"{name} = {-far:g}: {loss.tolist()}"
            for other, gradient in gradients.items():
                assert gradient.isfinite().all(), (
                    f"{name} = {-far:g}: gradient of {other} {gradient.tolist()}"
                )

    holds(row, check)


@every_preference
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_upcast_before_anything_else(row: Loss, dtype: torch.dtype) -> None:
    def check(setting: Setting) -> None:
        half = draw(setting, dtype=dtype)
        single = half | {name: x.float() for name, x in float_tensors(half).items()}
        assert setting.result(half).dtype == torch.float32
        assert torch.equal(setting.result(half), setting.result(single))

    holds(row, check)


@pytest.mark.usefixtures("annotation_checks")
@every_preference
def test_integer_scores_are_refused_where_types_are_checked(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting)
        for name, x in float_tensors(batch).items():
            with pytest.raises(Exception, match="(?i)type-check|violates|beartype"):
                setting.result(batch | {name: x.long()})

    holds(row, check)
