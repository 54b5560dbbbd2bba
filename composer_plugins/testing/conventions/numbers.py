"""Laws on one number: NaN, a batch without a token, precision, inputs and options without effect."""

from dataclasses import replace

import torch
from torch import Tensor

from composer_plugins.testing.conventions.law import TRAINED, reduced, require_close, said, value_and_gradient
from composer_plugins.testing.conventions.reduced import BATCHES, counts_of, part, ragged, reduced_of
from composer_plugins.testing.gradients import with_trained_gradients
from composer_plugins.testing.inputs import Batch, float_tensors
from composer_plugins.testing.laws import LAWS, NotApplicable
from composer_plugins.testing.laws.law import numbers, require
from composer_plugins.testing.laws.numbers import one_of_each_row, poisoned_at
from composer_plugins.testing.settings import Setting


def _poisoned(
    setting: Setting, batch: Batch, name: str, where: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient with NaN at these tokens of an input."""
    return value_and_gradient(setting, batch | {name: poisoned_at(batch[name], where)})


def _used(setting: Setting, name: str) -> bool:
    """Whether other numbers in an input change the loss or the gradient."""
    for options in BATCHES:
        batch = ragged(setting, **options)
        ours = value_and_gradient(setting, batch)
        moved = value_and_gradient(setting, batch | {name: batch[name] * 0.9 - 0.37})
        if any(not torch.equal(a, b) for a, b in zip(ours, moved, strict=True)):
            return True
    return False


@reduced()
def nan_is_seen_in_its_row_and_in_no_other(setting: Setting) -> None:
    """NaN at an unmasked token of an input gives a loss of NaN, and no NaN in the gradient of other rows."""
    for name in float_tensors(ragged(setting)):
        if not _used(setting, name):
            continue
        for options in BATCHES:
            batch = ragged(setting, **options)
            for row, token in one_of_each_row(batch["mask"]):
                loss, gradient = _poisoned(setting, batch, name, [(row, token)])
                what = f"NaN in {said(setting, name)} at row {row}, token {token}"
                require(loss.isnan(), f"{what} is hidden: the loss is {float(loss):.6g}")
                others = torch.arange(len(gradient)) != row
                require(gradient[others].isfinite().all(), f"{what} reaches the gradient of other rows")


@reduced()
def nan_in_an_input_is_nan_in_the_gradient_of_its_token(setting: Setting) -> None:
    """NaN in an input that is data is NaN in the gradient of its token, where a limit on the norm sees it.

    NaN in the policy's log-probabilities comes from logits, whose gradient is then NaN whatever the loss.
    """
    for name in float_tensors(ragged(setting)):
        if name == TRAINED or not _used(setting, name):
            continue
        for options in BATCHES:
            batch = ragged(setting, **options)
            # A token that is clipped has no gradient, with NaN in a factor of it either.
            where = one_of_each_row(value_and_gradient(setting, batch)[1] != 0)
            _, gradient = _poisoned(setting, batch, name, where)
            for row, token in where:
                found = float(gradient[row, token]) + 0.0  # 0, and not -0
                what = f"NaN in {said(setting, name)} at row {row}, token {token}"
                require(found != found, f"{what}: the gradient there is {found:.6g}")


@reduced(
    cause="an option of the framework, or a parameter of the function, that the function does not read, or "
    "reads by another name: use it, or raise an error"
)
def every_parameter_has_an_effect(setting: Setting) -> None:
    """Every option of the framework that a function must follow, and every parameter, changes the loss."""
    convention = reduced_of(setting).convention
    options = convention.options
    if not (options or convention.parameters) or setting.params or setting.choice.optional:
        raise NotApplicable("the framework passes no option to the function")
    if convention.parameters:
        LAWS[every_parameter_has_an_effect.__name__].check(setting)
    batch = ragged(setting, size=5)
    given = {name: batch[name] for name in setting.inputs}
    for option, values in options.items():
        found = []
        for value in values:
            choice = replace(setting.choice, params={option: value})
            called, _ = reduced_of(setting).called(given, counts_of(batch), choice.params)
            require(not called.misspelt, "; ".join(called.misspelt))
            found.append(float(value_and_gradient(replace(setting, choice=choice), batch)[0]))
        same = max(found) - min(found) <= 1e-9 * abs(found[0])
        require(not same, f"{option}: all of {', '.join(values)} give the loss {found[0]:.6g}")


@reduced(
    cause="an input that the framework passes where a user switches it on, and that the function does not "
    "use: use it, or raise an error where it is passed"
)
def every_input_has_an_effect(setting: Setting) -> None:
    """Other numbers in an input that a user's option switches on change the loss or the gradient."""
    names = [name for name in reduced_of(setting).convention.must_use if name in setting.inputs]
    if not names:
        raise NotApplicable("a loss need not use every input that the framework always passes")
    for name in names:
        require(_used(setting, name), f"other numbers in {said(setting, name)} change nothing")


@reduced()
def batch_without_an_unmasked_token_gives_zero_with_a_gradient(setting: Setting) -> None:
    """A micro-batch that is masked out gives 0, with a gradient of 0."""
    batch = ragged(setting)
    empty = batch | {"mask": torch.zeros_like(batch["mask"])}
    own = with_trained_gradients(setting, empty)
    loss = part(setting, own, counts_of(batch))
    require(loss.requires_grad, "the loss has no gradient, and DDP waits for one")
    require(bool(loss == 0), f"the loss is {float(loss.detach()):.6g}")
    (gradient,) = torch.autograd.grad(loss, own[TRAINED], materialize_grads=True)
    require(not gradient.any(), f"the gradient is {numbers(gradient)}")


@reduced()
def float32_is_close_to_float64(setting: Setting) -> None:
    """The float32 result is that of float64 on the same numbers, within roundings."""
    single = ragged(setting, seed=11, dtype=torch.float32)
    double = single | {name: x.double() for name, x in float_tensors(single).items()}
    ours, wanted = value_and_gradient(setting, single), value_and_gradient(setting, double)
    for found, one, what in zip(ours, wanted, ("the loss", "the gradient"), strict=True):
        magnitude = 10 * max(1.0, float(one.abs().max()))
        require_close(found, one, what, magnitude=magnitude, dtype=torch.float32)
