"""Every gradient is that of the value, or the one named: gradcheck, torch.func, the score form."""

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from composer_plugins.catalogue import Loss
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_trained_gradients
from composer_plugins.testing.inputs import draw, tensors
from composer_plugins.testing.settings import Setting
from parity_tests.support.every import Exceptions, each, holds, row_id, rows, stale

# What the catalogue declares of a row's gradient.
SCORE_FORM: Exceptions = {row_id(row): row.gradient for row in rows() if row.gradient == "score"}
SURROGATES: Exceptions = {row_id(row): row.gradient for row in rows() if row.gradient == "surrogate"} | {
    f"policy-{name}(weight_cap=1.5)": "a capped ratio keeps its gradient"
    for name in ("ppo", "grpo", "dapo", "dr_grpo")
}
NOT_BY_ROW: Exceptions = {
    "policy-clip_cov": "vmap refuses to draw random numbers; the fraction is of the batch",
    "policy-kl_cov": "the covariance is centred on the batch",
}


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([SCORE_FORM, SURROGATES, NOT_BY_ROW])


def is_derivative(setting: Setting) -> None:
    """The gradient is that of the value, away from kinks."""
    batch = with_trained_gradients(setting, draw(setting, 5, size=3, tokens=4, vocab=5, spread=0.7))
    trained = [batch[name] for name in setting.trained]

    def loss(*values: Tensor) -> Tensor:
        return setting.result(batch | dict(zip(setting.trained, values, strict=True)))

    assert torch.autograd.gradcheck(loss, trained, fast_mode=True)


def is_score(setting: Setting) -> None:
    """The loss is some weight times log pi(y_t), and the gradient is that weight."""
    batch = draw(setting)
    (name,) = setting.trained
    loss, gradients = value_and_gradients(setting, batch)
    wanted = torch.where(batch["mask"], loss / batch[name], 0.0)
    assert_parity(gradients[name], wanted, terms=2)


@each("policy", "divergence", "kl", "preference")
def test_gradient_is_that_of_the_value_or_that_of_a_score_form(row: Loss) -> None:
    def check(setting: Setting) -> None:
        try:
            is_derivative(setting)
        except GradcheckError:
            if row_id(row) not in SCORE_FORM:
                note = "a row of a detached weight times log pi declares gradient='score'"
                raise AssertionError(f"the gradient is not that of the value: {note}") from None
            is_score(setting)

    holds(row, check, SURROGATES)
    if row_id(row) in SCORE_FORM:
        holds(row, is_derivative, SCORE_FORM)  # some setting is of score form: it is named in earnest


@each("policy", "divergence", "kl")
def test_gradients_by_row_under_vmap_are_those_of_the_batch(row: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, 7)
        inputs, rest = tensors(batch), {n: x for n, x in batch.items() if n not in tensors(batch)}
        trained = {name: inputs.pop(name) for name in setting.trained}

        def total(trained: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
            return setting.result(rest | inputs | trained).sum()

        by_row = torch.func.vmap(torch.func.grad(total))(trained, inputs)
        for name, gradient in value_and_gradients(setting, batch)[1].items():
            assert_parity(by_row[name], gradient, terms=gradient.shape[1], what=name)

    holds(row, check, NOT_BY_ROW)


@each("policy", "divergence", "kl", "preference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_and_gradient_keep_the_precision_they_are_given(row: Loss, dtype: torch.dtype) -> None:
    def check(setting: Setting) -> None:
        loss, gradients = value_and_gradients(setting, draw(setting, dtype=dtype))
        assert loss.dtype == dtype and all(g.dtype == dtype for g in gradients.values())

    holds(row, check)
