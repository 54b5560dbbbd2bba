"""What a loss returns and what it does to its inputs."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.losses.calling import check_result
from composer_plugins.losses.inputs import INPUTS, TOKENS
from composer_plugins.testing.inputs import UNIFORM, Batch, float_tensors
from composer_plugins.testing.law import (
    EITHER,
    EVERY,
    FUNCTION,
    LOSS,
    ONE_NUMBER,
    PER_TOKEN,
    BrokenLaw,
    NotApplicable,
    law,
    require,
)
from composer_plugins.testing.settings import (
    Setting,
    settings,
    value_and_gradients,
    with_all_gradients,
    with_trained_gradients,
)

SPREADS = (0.3, 0.01, 3.0)  # of the policies: near, almost equal, far


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
    no_function=ONE_NUMBER,
    first=True,
)
def result_has_one_value_per_token(setting: Setting) -> None:
    """The result has the shape, the type, the gradient and the metrics that adapters expect."""
    if setting.loss.kind in PER_TOKEN and "mask" not in setting.inputs:
        require(False, "it takes no mask, so every masked token would count: add the input mask")
    for options in ({}, {"size": 1, "tokens": 1, "unmasked": 1.0}, {"per_token": False}):
        batch = with_all_gradients(setting.draw(**options))
        result = _called(setting, batch)
        try:
            check_result(setting.choice, batch, result)
        except ConfigError as error:
            require(False, f"{error.problem}; {error.remedy}")
        for name, metric in getattr(result, "metrics", {}).items():
            what, (value, where) = f"the metric {name!r}", metric
            require(not value.requires_grad, f"{what} carries a gradient: detach it", usable=True)
            if "mask" in batch and where.shape == batch["mask"].shape:
                require(not (where & ~batch["mask"]).any(), f"{what} counts masked tokens", usable=True)
            counted = value[where.expand(value.shape) if where.dim() else where]
            require(counted.isfinite().all(), f"{what} is not finite", usable=True)
    if setting.loss.kind in LOSS:
        result = setting.result(with_trained_gradients(setting, setting.draw()))
        problem = f"it has no gradient in {' or '.join(setting.trained)}: it is detached, or under no_grad"
        require(result.requires_grad, problem)


@law(FUNCTION, cause="a function of another convention", first=True)
def result_is_what_the_framework_takes(function: Any) -> None:
    """The result has the shape, the types and the gradient that the framework goes on with."""
    takes = f"{function.convention.framework} takes {function.convention.returns}"
    for options in ({}, {"size": 1, "tokens": 1, "unmasked": 1.0}, {"per_token": False}):
        try:
            problems = function.problems(with_trained_gradients(function, function.draw(**options)))
        except TypeError as error:  # of other parameters, or another result
            raise BrokenLaw(str(error), takes) from None
        require(not problems, "; ".join(problems), cause=takes, usable=True)


@law(
    *EVERY,
    FUNCTION,
    cause="an operation in place (add_, x[...] = y, out=): compute on a copy, x.clone()",
)
def inputs_are_not_written_to(setting: Setting) -> None:
    """The inputs hold the same numbers after the call as before it."""
    written = setting.written(with_trained_gradients(setting, setting.draw()))
    require(not written, f"the function writes to {', '.join(map(setting.named, written))}")


@law(
    *EVERY,
    FUNCTION,
    cause="random numbers without the generator that the loss is given, or state kept between calls",
)
def two_calls_give_the_same_result(setting: Setting) -> None:
    """The same inputs give the same result, whatever the state of torch's own random numbers."""
    batch, *_ = setting.batches()
    first, second = setting.run(batch), setting.run(batch, seed=20_260)
    setting.compare(second, first, "in a second call with the same inputs, {}", exactly=True)


@law(
    *LOSS,
    cause="a ratio or a weight that is not detached, or the loss detached from the policy's input",
)
def gradient_reaches_the_trained_inputs_only(setting: Setting) -> None:
    """The gradient reaches the inputs of the policy, and no other input."""
    batch = with_all_gradients(setting.draw())
    setting.result(batch).sum().backward()
    for name, x in float_tensors(batch).items():
        if name in setting.trained:
            require(x.grad is not None and bool(x.grad.any()), f"no gradient reaches {name!r}")
        elif name not in EITHER:
            require(x.grad is None or not x.grad.any(), f"a gradient reaches {name!r}: detach it")


@law(
    cause="log-probabilities that are detached, or tokens that are left out: a mask that is shifted by one, "
    "or a limit on the number of rows or tokens",
    own={FUNCTION: dict(name="gradient_reaches_the_trained_inputs_only")},
)
def every_unmasked_token_has_a_gradient(setting: Setting) -> None:
    """The log-probability of every unmasked token has a gradient where the policies are equal.

    The framework passes the rest as data. A token may count with one sign of its advantage only.
    """
    for signs in setting.both_signs():
        any_gradient = signs.raised.any() or signs.negated.any()
        require(any_gradient, "no gradient reaches the log-probabilities of the policy")
        left = signs.mask & (signs.raised == 0) & (signs.negated == 0)
        rows, tokens = ({*column.tolist()} for column in left.nonzero().T)
        where = [", ".join(map(str, sorted(places)[:8])) for places in (rows, tokens)]
        problem = (
            f"the gradient of {int(left.sum())} of {int(signs.mask.sum())} unmasked tokens is 0 with either "
            f"sign of the advantages: in rows {where[0]}, at tokens {where[1]}, counted from 0"
        )
        require(not left.any(), problem)


@law("advantage", "correction", cause="a computation on the inputs as they come: detach them first")
def result_has_no_gradient(setting: Setting) -> None:
    """An advantage and a correction are constants of the loss."""
    require(not setting.result(with_all_gradients(setting.draw())).requires_grad, "the result has a gradient")


def _with_certain_students(batch: Batch) -> Iterator[Batch]:
    """The batch, and where it has a teacher's top-k, one with a student whose mass is all within it."""
    yield batch
    if "teacher_topk_ids" in batch and "student_logits" in batch:
        certain = batch["student_logits"].scatter_add(
            -1, batch["teacher_topk_ids"], torch.full_like(batch["teacher_topk_logprobs"], 5.0)
        )
        yield batch | {"student_logits": certain}


class Effects(NamedTuple):
    """Everything that a call gives: the result and its gradients, and the metrics.

    Of one number for a batch only the gradient trains: a term that is added without one is as a metric.
    """

    trained: list[Tensor]
    logged: list[Tensor]


def _effects(setting: Setting, batch: Batch) -> Effects:
    result, gradients = value_and_gradients(setting, batch)
    metrics = getattr(setting(batch), "metrics", {}).values()
    logged = [tensor for one in metrics for tensor in (one.value, one.where.double())]
    if setting.one_number:
        return Effects([*gradients.values()], [result])
    return Effects([result, *gradients.values()], logged)


def _differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) != len(theirs) or any(
        a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(ours, theirs, strict=True)
    )


def _with_other_numbers(setting: Setting, name: str) -> Iterator[tuple[Batch, Batch]]:
    """Batches, each with one that differs from it in this input only."""
    for seed, spread, (factor, shift) in product(range(3), SPREADS, ((1.0, 0.37), (0.1, 0.0))):
        batch = setting.draw(seed, spread=spread, unmasked=0.9)
        moved = factor * batch[name] - shift  # a log-probability stays one
        if name == UNIFORM:
            moved = 1 - batch[name]
        if INPUTS[name].shape != TOKENS and batch[name].dim():  # a shift of all may cancel
            moved = moved * torch.linspace(0.5, 1.5, moved.shape[-1], dtype=moved.dtype)
        yield batch, batch | {name: moved}


def has_effect(setting: Setting, name: str) -> bool:
    """Whether other numbers in an input change the result, its gradient or a metric."""
    return any(
        any(map(_differ, _effects(setting, batch), _effects(setting, moved)))
        for batch, moved in _with_other_numbers(setting, name)
    )


@law(
    *EVERY,
    cause="an input that is taken and not used: use it, or take it out of the signature",
    thorough=False,
    own={
        FUNCTION: dict(
            summary="Other numbers in an input that a user's option switches on change the loss or the "
            "gradient.",
            cause="an input that the framework passes where a user switches it on, and that the function "
            "does not use: use it, or raise an error where it is passed",
            finding="unsafe",
        ),
    },
)
def every_input_has_an_effect(setting: Setting) -> None:
    """Another number in any input changes the result, its gradient or a metric."""
    names = setting.must_have_effect()
    if setting.one_number and not names:
        raise NotApplicable("a loss need not use every input that the framework always passes")
    for name in names:
        require(has_effect(setting, name), f"other numbers in {setting.named(name)} change nothing")


@law(
    *EVERY,
    cause="a parameter that is taken and not used: use it, or take it out of the signature",
    thorough=False,
    own={
        FUNCTION: dict(
            cause="an option of the framework, or a parameter of the function, that the function does not "
            "read, or reads by another name: use it, or raise an error",
            finding="unsafe",
        ),
    },
)
def every_parameter_has_an_effect(setting: Setting) -> None:
    """Another value of any parameter, or of an option that a function must follow, changes the result.

    That of a metric is not enough: a clip that is logged and not applied trains nothing.
    """
    if setting.label != list(settings(setting.loss, thorough=False))[-1].label:
        raise NotApplicable("the setting with all optional inputs is checked")
    if not setting.loss.parameters:
        raise NotApplicable("it has no parameter")
    for sentence in setting.misspelt():
        require(False, sentence, finding="failed")
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
            for batch in _with_certain_students(first.draw(seed, spread=spread, unmasked=unmasked, size=6))
        )
        is_logged = False
        for batch in batches:
            found = [_effects(one, batch) for one in (first, *others)]
            if any(_differ(found[0].trained, one.trained) for one in found[1:]):
                break
            is_logged |= any(_differ(found[0].logged, one.logged) for one in found[1:])
        else:
            other = (
                "gradient, and another loss" if setting.one_number else "loss and gradient, and other metrics"
            )
            same = f"all give the same{f' {other}' * is_logged}"
            require(False, f"{name!r}: {[one.choice.value(name) for one in pair]} {same}")
    if len(unknown) == len(setting.loss.parameters):
        raise NotApplicable(f"no other value of {', '.join(unknown)} is known")
