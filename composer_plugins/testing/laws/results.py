"""What a loss returns and what it does to its inputs."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses.calling import check_result
from composer_plugins.losses.inputs import INPUTS, TOKENS
from composer_plugins.testing.gradients import value_and_gradients, with_all_gradients, with_trained_gradients
from composer_plugins.testing.inputs import Batch, draw, float_tensors, tensors
from composer_plugins.testing.laws.law import (
    EITHER,
    EVERY,
    LOSS,
    PER_TOKEN,
    NotApplicable,
    law,
    require,
    require_equal,
)
from composer_plugins.testing.settings import NUM_GROUPS, UNIFORM, Setting, settings

SPREADS = (0.3, 0.01, 3.0)  # of the policies: near, almost equal, far
# Inputs whose numbers are an order or a count: another number may mean the same.
LABELS = {"group_ids", NUM_GROUPS, "generator", "mask", "component_mask", "desirable"}


def _called(setting: Setting, batch: Batch) -> Any:
    """Call the loss; BrokenLaw if it takes only a mask of floats."""
    try:
        return setting(batch)
    except Exception:
        if "mask" not in batch:
            raise
        try:
            setting(batch | {"mask": batch["mask"].double()})
        except Exception:
            pass
        else:
            require(False, "it takes a mask of floats only; masks are bool: use ~mask and torch.where")
        raise


@law(
    *EVERY,
    cause="a mean over the tokens, a bare tensor, a detached loss, or a metric that is a number: return "
    "TokenLoss(loss, {'name': Metric(value.detach(), where)}), one loss per token (PairLoss: per pair); the "
    "adapter divides",
)
def result_has_one_value_per_token(setting: Setting) -> None:
    """The result has the shape, the type, the gradient and the metrics that adapters expect."""
    if setting.loss.kind in PER_TOKEN and "mask" not in setting.inputs:
        require(False, "it takes no mask, so every masked token would count: add the input mask")
    for options in ({}, {"size": 1, "tokens": 1, "unmasked": 1.0}, {"per_token": False}):
        batch = with_all_gradients(draw(setting, **options))
        result = _called(setting, batch)
        try:
            check_result(setting.choice, batch, result)
        except ConfigError as error:
            require(False, f"{error.problem}; {error.remedy}")
        for name, metric in getattr(result, "metrics", {}).items():
            require(not metric.value.requires_grad, f"the metric {name!r} carries a gradient: detach it")
            counted = metric.where.expand(metric.value.shape) if metric.where.dim() else metric.where
            if "mask" in batch and metric.where.shape == batch["mask"].shape:
                require(
                    not (metric.where & ~batch["mask"]).any(), f"the metric {name!r} counts masked tokens"
                )
            require(metric.value[counted].isfinite().all(), f"the metric {name!r} is not finite")
    if setting.loss.kind in LOSS:
        result = setting.result(with_trained_gradients(setting, draw(setting)))
        problem = f"it has no gradient in {' or '.join(setting.trained)}: it is detached, or under no_grad"
        require(result.requires_grad, problem)


@law(*EVERY, cause="an operation in place (add_, x[...] = y, out=): compute on a copy, x.clone()")
def inputs_are_not_written_to(setting: Setting) -> None:
    """The inputs hold the same numbers after the call as before it."""
    batch = draw(setting)
    before = {name: x.clone() for name, x in tensors(batch).items()}
    setting.result(batch)
    for name, x in tensors(batch).items():
        require_equal(x.double(), before[name].double(), f"the input {name!r} was changed")


@law(*EVERY, cause="random numbers without the generator that the loss is given, or state kept between calls")
def two_calls_give_the_same_result(setting: Setting) -> None:
    """The same inputs give the same result, whatever the state of torch's own random numbers."""
    batch = draw(setting)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = setting.result(batch)
        torch.manual_seed(2)
        require_equal(setting.result(batch), first, "two calls with the same inputs differ")


@law(
    *LOSS,
    cause="a ratio or a weight that is not detached, or the loss detached from the policy's input",
)
def gradient_reaches_the_trained_inputs_only(setting: Setting) -> None:
    """The gradient reaches the inputs of the policy, and no other input."""
    batch = with_all_gradients(draw(setting))
    setting.result(batch).sum().backward()
    for name, x in float_tensors(batch).items():
        if name in setting.trained:
            require(x.grad is not None and bool(x.grad.any()), f"no gradient reaches {name!r}")
        elif name not in EITHER:
            require(x.grad is None or not x.grad.any(), f"a gradient reaches {name!r}: detach it")


@law("advantage", "correction", cause="a computation on the inputs as they come: detach them first")
def result_has_no_gradient(setting: Setting) -> None:
    """An advantage and a correction are constants of the loss."""
    require(not setting.result(with_all_gradients(draw(setting))).requires_grad, "the result has a gradient")


def _with_certain_students(batch: Batch) -> Iterator[Batch]:
    """The batch, and where it has a teacher's top-k, one with a student whose mass is all within it."""
    yield batch
    if "teacher_topk_ids" in batch and "student_logits" in batch:
        certain = batch["student_logits"].scatter_add(
            -1, batch["teacher_topk_ids"], torch.full_like(batch["teacher_topk_logprobs"], 5.0)
        )
        yield batch | {"student_logits": certain}


def _effects(setting: Setting, batch: Batch) -> list[Tensor]:
    """Everything that a call gives: the result, its gradients, its metrics."""
    result, gradients = value_and_gradients(setting, batch)
    metrics = getattr(setting(batch), "metrics", {}).values()
    return [result, *gradients.values(), *(m.value for m in metrics), *(m.where.double() for m in metrics)]


def _differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) != len(theirs) or any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, theirs, strict=True)
    )


def _with_other_numbers(setting: Setting, name: str) -> Iterator[tuple[Batch, Batch]]:
    """Batches, each with one that differs from it in this input only."""
    for seed, spread, (factor, shift) in product(range(3), SPREADS, ((1.0, 0.37), (0.1, 0.0))):
        batch = draw(setting, seed, spread=spread, unmasked=0.9)
        moved = factor * batch[name] - shift  # a log-probability stays one
        if name == UNIFORM:
            moved = 1 - batch[name]
        if INPUTS[name].shape != TOKENS and batch[name].dim():  # a shift of all may cancel
            moved = moved * torch.linspace(0.5, 1.5, moved.shape[-1], dtype=moved.dtype)
        yield batch, batch | {name: moved}


@law(
    *EVERY,
    cause="an input that is taken and not used: use it, or take it out of the signature",
    thorough=False,
)
def every_input_has_an_effect(setting: Setting) -> None:
    """Another number in any input changes the result, its gradient or a metric."""
    for name in float_tensors(draw(setting)):
        if name not in LABELS and INPUTS[name].shape != "[components]":
            require(
                any(
                    _differ(_effects(setting, batch), _effects(setting, moved))
                    for batch, moved in _with_other_numbers(setting, name)
                ),
                f"other numbers in {name!r} change nothing",
            )


@law(
    *EVERY,
    cause="a parameter that is taken and not used: use it, or take it out of the signature",
    thorough=False,
)
def every_parameter_has_an_effect(setting: Setting) -> None:
    """Another value of any parameter changes the result, its gradient or a metric."""
    if setting.label != list(settings(setting.loss, thorough=False))[-1].label:
        raise NotApplicable("the setting with all optional inputs is checked")
    if not setting.loss.parameters:
        raise NotApplicable("it has no parameter")
    unknown = list[str]()
    for name in setting.loss.parameters:
        if len(pair := list(setting.with_values_of(name))) < 2:
            unknown.append(name)  # a string, whose other values are not known
            continue
        first, *others = pair
        batches = (
            batch
            for seed in range(4)
            for spread in (*SPREADS, 1e4)
            for unmasked in (0.7, 1.0)
            for batch in _with_certain_students(draw(first, seed, spread=spread, unmasked=unmasked, size=6))
        )
        moves = any(
            _differ(effects, _effects(other, batch))
            for batch in batches
            for effects in [_effects(first, batch)]
            for other in others
        )
        require(moves, f"{name!r}: {[one.choice.value(name) for one in pair]} all give the same")
    if len(unknown) == len(setting.loss.parameters):
        raise NotApplicable(f"no other value of {', '.join(unknown)} is known")
