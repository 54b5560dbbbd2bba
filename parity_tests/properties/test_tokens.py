"""Properties of every loss per token of the catalogue: masking, micro-batches, order, types, NaN."""

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.catalogue import Loss
from composer_plugins.inputs import INPUTS, TOKENS, TOP_K, VOCAB
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.plugins import losses
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_all_gradients
from composer_plugins.testing.inputs import (
    draw,
    expand_mask,
    float_tensors,
    pad_tokens,
    select_rows,
    tensors,
    with_junk,
)
from composer_plugins.testing.settings import UNIFORM, Setting
from parity_tests.support.every import Exceptions, each, holds, stale

DRAWS = [
    {"seed": 0},
    {"seed": 1, "spread": 1.5, "unmasked": 0.5},
    {"seed": 2, "spread": 0.01, "per_token": False, "tokens": 3, "size": 5},
    {"seed": 3, "size": 1, "tokens": 1, "unmasked": 1.0},
]
PER_TOKEN = (TOKENS, VOCAB, TOP_K)
EITHER = {"entropies", "topk_logprobs"}  # a bonus has a gradient in them, a gate has none

# Of every batch a fraction of tokens is chosen: over a part of it, others are.
CUT: Exceptions = {
    "policy-clip_cov": "a fraction of the tokens with a high covariance is drawn from the batch",
    "policy-kl_cov": "the covariance is centred on the batch, and its top fraction is taken",
}
RANDOM: Exceptions = {"policy-clip_cov+generator": "what is drawn depends on where a token stands"}
# NaN reaches other rows.
SPREADS: Exceptions = dict.fromkeys(
    (f"correction-{name}(normalise=True)" for name in ("tis", "mis", "icepop")), "divided by a mean"
)
every_token_loss = each("policy", "divergence", "kl")
everything_per_token = each("policy", "divergence", "kl", "correction")


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([CUT, RANDOM, SPREADS])
    assert {f"{row.kind}-{row.name}" for row in losses() if row.over_batch and row.kind == "policy"} == set(
        CUT
    )


@everything_per_token
def test_masked_tokens_are_exactly_zero_whatever_they_hold(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = draw(setting, **options)
            mask = batch["mask"]
            dirty = batch | {
                name: with_junk(x, expand_mask(mask, x))
                for name, x in float_tensors(batch).items()
                if INPUTS[name].shape in PER_TOKEN and x.shape[: mask.dim()] == mask.shape
            }
            weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            wanted, wanted_gradients = value_and_gradients(setting, batch, weight)
            loss, gradients = value_and_gradients(setting, dirty, weight)
            assert loss.shape == mask.shape
            assert not loss[~mask].any(), "the loss is not 0 where masked"
            assert torch.equal(loss, wanted), "the loss depends on what is masked"
            for name, gradient in gradients.items():
                assert not gradient[~mask].any(), f"the gradient of {name} is not 0 where masked"
                assert torch.equal(gradient, wanted_gradients[name]), f"that of {name} depends on it"

    holds(row, check)


@everything_per_token
def test_nan_at_an_unmasked_token_is_nan_there_and_nowhere_outside_its_row(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = draw(setting, **options)
            batch["mask"][0, 0] = True
            for name, x in float_tensors(batch).items():
                if INPUTS[name].shape not in PER_TOKEN or name == UNIFORM:
                    continue
                poisoned = x.clone()
                poisoned[0, 0] = torch.nan
                if x.dim() == 3:  # one entry of the vocabulary is enough
                    poisoned[0, 0, 1:] = x[0, 0, 1:]
                loss, gradients = value_and_gradients(setting, batch | {name: poisoned})
                assert loss[0, 0].isnan(), f"NaN in {name} is hidden"
                assert loss[1:].isfinite().all(), f"NaN in {name} reaches other rows"
                assert not loss[~batch["mask"]].any(), f"NaN in {name} reaches masked tokens"
                for other, gradient in gradients.items():
                    assert gradient[1:].isfinite().all(), f"NaN in {name}: the gradient of {other}"

    holds(row, check, SPREADS)


@everything_per_token
def test_rows_may_come_in_any_order(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = draw(setting, **options)
            order = torch.randperm(batch["mask"].shape[0], generator=torch.Generator().manual_seed(4))
            loss, gradients = value_and_gradients(setting, batch)
            shuffled, shuffled_gradients = value_and_gradients(setting, select_rows(batch, order))
            assert_parity(shuffled, loss[order], terms=loss.numel())
            for name, gradient in gradients.items():
                assert_parity(shuffled_gradients[name], gradient[order], terms=loss.numel(), what=name)

    holds(row, check, RANDOM)


@everything_per_token
def test_packed_tokens_are_a_batch_of_one_row(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = draw(setting, **options | {"size": 1, "unmasked": 1.0})
            batch["mask"][0, -1] = batch["mask"].shape[1] == 1
            packed = batch | {
                n: x[0] if INPUTS[n].shape in PER_TOKEN else x for n, x in tensors(batch).items()
            }
            assert_parity(setting.result(packed)[None], setting.result(batch), terms=batch["mask"].numel())
            nested = batch | {n: x[None] for n, x in tensors(batch).items()}
            assert_parity(setting.result(nested)[0], setting.result(batch), terms=batch["mask"].numel())

    holds(row, check)


@everything_per_token
def test_more_padding_changes_nothing(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = draw(setting, **options)
            columns = batch["mask"].shape[1]
            if columns == 1:  # nothing tells an axis of one token from an axis to broadcast
                continue
            loss, gradients = value_and_gradients(setting, batch)
            padded, padded_gradients = value_and_gradients(setting, pad_tokens(batch, 3))
            assert not padded[:, columns:].any()
            assert_parity(padded[:, :columns], loss, terms=columns)
            for name, gradient in gradients.items():
                assert_parity(padded_gradients[name][:, :columns], gradient, terms=columns, what=name)

    holds(row, check, RANDOM)


def reduced(loss: Tensor, mask: Tensor, mode: Mode, **counts: Any) -> Tensor:
    return aggregate(loss, mask, mode, max_length=11, group_ids=torch.arange(len(mask)), **counts)


@every_token_loss
def test_cut_into_micro_batches_leaves_the_gradient_alone_in_every_mode(row: Loss) -> None:
    def check(setting: Setting) -> None:
        modes = cycle(Mode.__args__)  # six cuts, six modes
        for options in DRAWS[:2]:
            batch = with_all_gradients(draw(setting, **options))
            mask, trained = batch["mask"], [batch[name] for name in setting.trained]
            rows = mask.shape[0]  # each is a prompt of its own
            counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "num_prompts": rows}
            whole = setting.result(batch)
            magnitude = float(whole.detach().abs().max())
            for parts in (1, 2, 4):
                mode = next(modes)
                wanted = reduced(whole, mask, mode)
                cut = [select_rows(batch, index) for index in torch.arange(mask.shape[0]).chunk(parts)]
                total = torch.stack(
                    [reduced(setting.result(part), part["mask"], mode, **counts) for part in cut]
                ).sum()
                assert_parity(total, wanted, terms=whole.numel(), magnitude=magnitude, what=mode)
                ours = torch.autograd.grad(total, trained, materialize_grads=True)
                theirs = torch.autograd.grad(wanted, trained, retain_graph=True, materialize_grads=True)
                for gradient, one in zip(ours, theirs, strict=True):
                    assert_parity(gradient, one, terms=whole.numel(), what=f"gradient, {mode}")

    holds(row, check, CUT)


@everything_per_token
def test_only_the_trained_inputs_get_a_gradient(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = with_all_gradients(draw(setting))
        result = setting.result(batch)
        if not setting.trained:
            assert not result.requires_grad
            return
        result.sum().backward()
        for name, x in float_tensors(batch).items():
            if name in setting.trained:
                assert x.grad is not None and x.grad.any(), f"no gradient reaches {name}"
            elif name not in EITHER:
                assert x.grad is None or not x.grad.any(), f"a gradient reaches {name}"

    holds(row, check)


@every_token_loss
def test_metrics_are_detached_and_count_unmasked_tokens_only(row: Loss) -> None:
    def check(setting: Setting) -> None:
        for options in DRAWS:
            batch = with_all_gradients(draw(setting, **options))
            result = setting(batch)
            for name, metric in getattr(result, "metrics", {}).items():
                assert not metric.value.requires_grad, f"{name} carries a gradient"
                assert metric.where.dtype == torch.bool, f"where {name} counts is no mask"
                assert metric.value.shape == metric.where.shape, f"{name} and where it counts differ in shape"
                if metric.where.shape == batch["mask"].shape:
                    assert not (metric.where & ~batch["mask"]).any(), f"{name} counts masked tokens"
                assert metric.value[metric.where].isfinite().all(), f"{name} is not finite"

    holds(row, check)


@pytest.mark.usefixtures("annotation_checks")
@everything_per_token
def test_mask_of_numbers_and_integer_logprobs_are_refused_where_types_are_checked(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting)
        wrong = [("mask", batch["mask"].double()), ("mask", batch["mask"].long())]
        wrong += [(name, x.long()) for name, x in float_tensors(batch).items()]
        for name, x in wrong:
            with pytest.raises(Exception, match="(?i)type-check|violates|beartype"):
                setting.result(batch | {name: x})

    holds(row, check)
