"""NaN in, NaN out, in the gradient too: a guard on its norm then sees a NaN in any input of a loss."""

import pytest
import torch
from torch import Tensor

from composer_plugins.catalogue import Loss
from composer_plugins.inputs import INPUTS, PAIRS, ROWS, TOKENS, TOP_K, VOCAB
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.policy import grpo, gspo
from composer_plugins.testing.gradients import value_and_gradients
from composer_plugins.testing.inputs import Batch, draw, float_tensors
from composer_plugins.testing.settings import UNIFORM, Setting, settings
from parity_tests.support.every import Exceptions, each, holds, row_id, rows, stale

# How far apart the policies are: inside a clip, beyond some, beyond all, beyond where exp overflows.
SPREADS = (0.01, 0.4, 3.0, 1e4)
# log pi itself. It is NaN where the logits are, and the gradient of the logits is NaN then: a test below.
LINEAR: Exceptions = dict.fromkeys(
    ("policy-reinforce", "policy-rloo", "policy-gpg", "policy-iw_opd"), "a constant slope in log pi"
)


def test_every_exception_is_a_row_of_the_catalogue() -> None:
    assert not stale([LINEAR])


def one_of_each_row(mask: Tensor) -> list[tuple[int, int]]:
    """The first unmasked token of each row that has one."""
    return [(row, int(unmasked.nonzero()[0])) for row, unmasked in enumerate(mask) if unmasked.any()]


def poisoned(x: Tensor, where: list[tuple[int, int]]) -> Tensor:
    """`x` with NaN at these tokens; of a vocabulary, at one entry."""
    x = x.clone()
    for token in where:
        x[token if x.dim() == 2 else (*token, 0)] = torch.nan
    return x


def per_token(setting: Setting, batch: Batch, *, trained: bool) -> list[str]:
    """The inputs with numbers per token: those that get a gradient, or those that do not."""
    shapes = {name: INPUTS[name].shape for name in float_tensors(batch) if name != UNIFORM}
    names = [name for name, shape in shapes.items() if shape in (TOKENS, VOCAB, TOP_K)]
    return [name for name in names if (name in setting.trained) == trained]


def assert_seen(setting: Setting, *, trained: bool) -> None:
    """NaN at a token of an input is NaN in the loss there, and in the gradient of a trained input there."""
    for seed, spread in enumerate(SPREADS):
        batch = draw(setting, seed, spread=spread)
        where = one_of_each_row(batch["mask"])
        for name in per_token(setting, batch, trained=trained):
            loss, gradients = value_and_gradients(setting, batch | {name: poisoned(batch[name], where)})
            for token in where:
                what = f"NaN in {name}, spread {spread}: "
                assert loss[token].isnan(), f"{what}loss {loss[token]}"
                found = {other: gradient[token] for other, gradient in gradients.items()}
                assert any(g.isnan().any() for g in found.values()), f"{what}gradient {found}"


@each("policy", "divergence", "kl")
def test_nan_in_a_constant_is_nan_in_the_gradient_of_its_token(row: Loss) -> None:
    holds(row, lambda setting: assert_seen(setting, trained=False))


@each("policy", "divergence", "kl")
def test_nan_in_a_trained_input_is_nan_in_the_gradient_of_its_token(row: Loss) -> None:
    holds(row, lambda setting: assert_seen(setting, trained=True), LINEAR)


@pytest.mark.parametrize("row", [row for row in rows("policy") if row_id(row) in LINEAR], ids=row_id)
def test_nan_logits_are_nan_in_their_gradient_where_the_loss_is_linear(row: Loss) -> None:
    setting = next(settings(row))
    batch = draw(setting, unmasked=1.0)
    logits = torch.randn(*batch["mask"].shape, 5, dtype=torch.float64)
    logits[0, 0, 1] = torch.nan
    logits.requires_grad_()
    loss = setting.result(batch | {"logprobs": logits.log_softmax(-1)[..., 0]})
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert gradient[0, 0].isnan().all()


@each("correction")
@pytest.mark.parametrize("loss", [grpo, gspo], ids=["grpo", "gspo"])
def test_nan_in_a_correction_is_nan_in_the_gradient_of_the_loss_that_it_weighs(row: Loss, loss: Loss) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, spread=0.01)
        mask, old = batch["mask"], batch["old_logprobs"]
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64).unsqueeze(1)
        where = one_of_each_row(mask)
        for name in per_token(setting, batch, trained=False):
            weights = setting.result(batch | {name: poisoned(batch[name], where)})
            logprobs = old.clone().requires_grad_()  # no token is clipped
            corrected(loss(logprobs, old, advantages, mask), weights, mask).loss.sum().backward()
            assert all(logprobs.grad[token].isnan() for token in where), f"NaN in {name}: {logprobs.grad}"

    holds(row, check)


@each("preference")
@pytest.mark.parametrize("spread", [0.3, 30.0, 1e6])
def test_nan_in_a_score_is_nan_in_a_gradient(row: Loss, spread: float) -> None:
    def check(setting: Setting) -> None:
        batch = draw(setting, size=5, spread=spread)
        for name, x in float_tensors(batch).items():
            if name.endswith("_nll"):  # a term with a constant slope
                continue
            given = x.clone()
            given[2 if INPUTS[name].shape in (PAIRS, ROWS) else ...] = torch.nan
            _, gradients = value_and_gradients(setting, batch | {name: given})
            assert any(g.isnan().any() for g in gradients.values()), f"NaN in {name}: {gradients}"

    holds(row, check)
