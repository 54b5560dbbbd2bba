"""Laws of gradients: they are those of the value, or those that the row declares."""

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import tensors
from composer_plugins.testing.law import (
    FUNCTION,
    LOSS,
    ONE_NUMBER,
    PER_TOKEN_LOSS,
    BrokenLaw,
    NotApplicable,
    law,
    of_the_batch,
)
from composer_plugins.testing.settings import (
    Setting,
    require_one_without,
    value_and_gradients,
    with_trained_gradients,
)


def require_derivative(setting: Setting, seed: int = 5) -> None:
    """Require the gradient of the value, away from kinks."""
    size = 9 if setting.one_number else 3  # many of its tokens are masked out
    batch = with_trained_gradients(setting, setting.draw(seed, size=size, tokens=4, vocab=5, spread=0.7))
    trained = [batch[name] for name in setting.trained]

    def loss(*values: Tensor) -> Tensor:
        return setting.result(batch | dict(zip(setting.trained, values, strict=True)))

    try:
        torch.autograd.gradcheck(loss, trained, fast_mode=True)
    except GradcheckError as error:
        said = " ".join(str(error).split())
        raise BrokenLaw(f"the gradient is not that of the value: {said[:300]}") from None


def is_score(setting: Setting) -> None:
    """Require that the loss is some weight times log pi(y_t), and the gradient that weight."""
    batch = setting.draw()
    (name,) = setting.trained
    loss, gradients = value_and_gradients(setting, batch)
    wanted = torch.where(batch["mask"], loss / batch[name], 0.0)
    assert_parity(gradients[name], wanted, terms=2, what="gradient of a detached weight times log pi")


def of_a_surrogate(loss: Loss) -> str:
    """The excuse of a loss with gradient="surrogate"."""
    return "it declares gradient='surrogate'" if loss.gradient == "surrogate" else ""


def of_a_function(loss: Loss) -> str:
    """The excuse of a function that returns one number, unless it declares gradient="derivative"."""
    text = (
        "its gradient is not the derivative of its value, because a factor is detached, as in CISPO. If that "
        "is not intended, set the function's attribute gradient to 'derivative': then this fails"
    )
    return "" if loss.gradient == "derivative" else text


@law(
    *LOSS,
    cause="a detached factor: of a detached weight times log pi, declare gradient='score'; with "
    "another term beside it, such as a KL, or of another gradient in the place of the derivative, "
    "gradient='surrogate'",
    excuse=of_a_surrogate,
    own={FUNCTION: dict(summary="The gradient is the derivative of the value.", excuse=of_a_function)},
)
def gradient_is_that_of_the_value(setting: Setting) -> None:
    """The gradient is the derivative of the value; with gradient="score", the weight of log pi."""
    try:
        require_derivative(setting)
    except BrokenLaw:
        if setting.loss.gradient != "score":
            raise
        is_score(setting)


@law(
    *PER_TOKEN_LOSS,
    cause="a gradient that is that of the value: do not declare another one",
    no_function="a function of this convention declares no gradient",
)
def declared_gradient_is_the_one_that_it_has(setting: Setting) -> None:
    """A row that declares gradient="score" or "surrogate" does not have the gradient of its value."""
    gradient = setting.loss.gradient
    if gradient == "derivative":
        raise NotApplicable("it declares no special gradient")

    def derivative_of_every_draw(one: Setting) -> None:
        for seed in (5, 6, 7):  # the weight may be a constant on one side of a clamp
            require_derivative(one, seed)

    problem = f"it declares gradient={gradient!r}, and its gradient is the derivative"
    require_one_without(setting, derivative_of_every_draw, problem)


@law(
    *PER_TOKEN_LOSS,
    cause="a number that is taken from the whole batch: .mean() or .max() over rows",
    finding="untraceable",
    excuse=of_the_batch,
    no_function=ONE_NUMBER,
)
def rows_under_vmap_give_the_gradients_of_the_batch(setting: Setting) -> None:
    """`torch.func.vmap(torch.func.grad(...))` over rows gives the gradient of the batch."""
    batch = setting.draw(7)
    inputs, rest = tensors(batch), {n: x for n, x in batch.items() if n not in tensors(batch)}
    trained = {name: inputs.pop(name) for name in setting.trained}

    def total(trained: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
        return setting.result(rest | inputs | trained).sum()

    by_row = torch.func.vmap(torch.func.grad(total))(trained, inputs)
    for name, gradient in value_and_gradients(setting, batch)[1].items():
        assert_parity(by_row[name], gradient, terms=gradient.shape[1], what=name)
