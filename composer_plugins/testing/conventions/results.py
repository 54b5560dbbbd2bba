"""Laws on one number: what a function returns, masking, cuts of the batch, order, padding."""

import torch
from torch import Tensor

from composer_plugins.losses.row import Loss
from composer_plugins.testing.conventions.law import TRAINED, reduced, require_close, said, value_and_gradient
from composer_plugins.testing.conventions.reduced import (
    BATCHES,
    DRAWS,
    LONG,
    counts_of,
    masked_with,
    part,
    ragged,
    reduced_of,
    rows_of,
)
from composer_plugins.testing.gradients import with_trained_gradients
from composer_plugins.testing.inputs import JUNK, float_tensors, pad_tokens, select_rows
from composer_plugins.testing.laws import BrokenLaw, NotApplicable
from composer_plugins.testing.laws.gradients import require_derivative
from composer_plugins.testing.laws.law import require
from composer_plugins.testing.laws.tokens import cuts
from composer_plugins.testing.settings import Setting, settings

FINITE = torch.tensor([-40.0, -0.5, 0.0, 7.0], dtype=torch.float64)  # as those of a prompt, a tool, padding


@reduced(cause="a function of another convention")
def result_is_what_the_framework_takes(setting: Setting) -> None:
    """The result has the shape, the types and the gradient that the framework goes on with."""
    for options in ({}, {"size": 1, "tokens": 1, "unmasked": 1.0}, {"per_token": False}):
        batch = with_trained_gradients(setting, ragged(setting, **options))
        given = {name: batch[name] for name in setting.inputs}
        try:
            found, _ = reduced_of(setting).called(given, counts_of(batch), setting.params)
        except TypeError as error:
            raise BrokenLaw(str(error)) from None
        require(not found.problems, "; ".join(found.problems))


FIRST = result_is_what_the_framework_takes.__name__  # without it no other law can be looked at


def error_of(row: Loss) -> Exception | None:
    """The error of one call: None if the function returns a loss, perhaps with wrong metrics beside it."""
    setting = next(settings(row))
    try:
        value_and_gradient(setting, ragged(setting))
    except Exception as error:  # any that a user's function raises: the law above has said which
        return error
    return None


@reduced()
def inputs_are_not_written_to(setting: Setting) -> None:
    """The inputs hold the same numbers after the call as before it."""
    batch = with_trained_gradients(setting, ragged(setting))
    given = {name: batch[name] for name in setting.inputs}
    _, written = reduced_of(setting).called(given, counts_of(batch), setting.params)
    require(not written, f"the function writes to {', '.join(said(setting, name) for name in written)}")


@reduced()
def masked_tokens_have_no_influence(setting: Setting) -> None:
    """Other finite numbers at masked tokens of every input leave the loss and the gradient as they are."""
    _require_masked(setting, FINITE)


@reduced(
    cause="a product with the mask: NaN * 0 and inf * 0 are NaN. Mask with torch.where before exp; after it, "
    "the gradient is NaN even so",
)
def masked_nan_and_infinities_have_no_influence(setting: Setting) -> None:
    """NaN, infinities and 1e4 at masked tokens of every input leave the loss and the gradient as they are."""
    _require_masked(setting, JUNK)


def _require_masked(setting: Setting, values: Tensor) -> None:
    for options in DRAWS:
        batch = ragged(setting, **options)
        wanted = value_and_gradient(setting, batch)
        require(not wanted[1][~batch["mask"]].any(), "the gradient is not 0 where masked")
        dirty, problems = masked_with(batch, values), []
        for name in float_tensors(batch):
            found = value_and_gradient(setting, batch | {name: dirty[name]})
            try:
                for ours, one, what in zip(found, wanted, ("the loss", "the gradient"), strict=True):
                    require_close(ours, one, what)
            except BrokenLaw as error:
                problems.append(f"with other numbers at masked tokens of {said(setting, name)}, {error}")
        require(not problems, "; ".join(problems))


@reduced(
    cause="log-probabilities that are detached, or tokens that are left out: a mask that is shifted by one, "
    "or a limit on the number of rows or tokens",
)
def gradient_reaches_the_trained_inputs_only(setting: Setting) -> None:
    """A gradient reaches the log-probability of every unmasked token.

    The framework passes the rest as data. The policies are close, so that no token is clipped. A token may
    count with one sign of its advantage only.
    """
    for options in BATCHES:
        batch = ragged(setting, **options | {"spread": 0.01})
        flipped = batch | {"advantages": -batch["advantages"]} if "advantages" in batch else batch
        gradients = [value_and_gradient(setting, one)[1] for one in (batch, flipped)]
        require(
            gradients[0].any() or gradients[1].any(),
            "no gradient reaches the log-probabilities of the policy",
        )
        left = batch["mask"] & (gradients[0] == 0) & (gradients[1] == 0)
        if left.any():
            row, token = left.nonzero()[0].tolist()
            raise BrokenLaw(
                f"the gradient at row {row}, token {token}, which is unmasked, is 0 with either sign of the "
                f"advantage ({int(left.sum())} of {int(batch['mask'].sum())} unmasked tokens)"
            )


@reduced()
def gradient_is_that_of_the_value(setting: Setting) -> None:
    """The gradient is the derivative of the value."""
    try:
        require_derivative(setting)
    except BrokenLaw:
        if setting.loss.gradient == "derivative":
            raise
        raise NotApplicable(
            "its gradient is not the derivative of its value, because a factor is detached, as in CISPO. If "
            "that is not intended, set the function's attribute gradient to 'derivative': then this fails"
        ) from None


@reduced(
    cause="a mean or another statistic of the micro-batch inside the function: divide by the counts of the "
    "whole batch, which the framework passes or divides by itself",
)
def micro_batches_and_ranks_leave_the_gradient_alone(setting: Setting) -> None:
    """A batch that is cut into 1, 2 or 4 micro-batches, or for two ranks, has the same loss and gradient."""
    equal = reduced_of(setting).convention.equal_parts
    for options in BATCHES:
        batch = ragged(setting, **options | ({"size": 8 if options is LONG else 4} if equal else {}))
        batch["mask"][:, 0] = True  # a micro-batch that is masked out has a law of its own
        index = torch.arange(batch["mask"].shape[0])
        wanted, wanted_gradient = value_and_gradient(setting, batch)
        found = [*cuts(len(index), options["seed"])]
        if equal:
            found = [[*index.chunk(parts)] for parts in (1, 2, 4)] + found[-1:]
        for place, parts in enumerate(found):
            ranks = len(parts) if place == len(found) - 1 else 1  # the last one is that of the ranks
            counts = counts_of(batch, len(parts) // ranks, ranks)
            own = with_trained_gradients(setting, batch)
            total = torch.stack([part(setting, rows_of(own, rows), counts) for rows in parts]).sum()
            gradient = torch.autograd.grad(total, own[TRAINED], materialize_grads=True)[0]
            what = f"{len(parts)} {'ranks' if ranks > 1 else 'micro-batches'} of {len(index)} rows"
            require_close(gradient, wanted_gradient, f"the gradient of {what}")
            require_close(total, wanted, f"the loss of {what}")


# A loss of verl or TRL with such a term breaks the law of micro-batches and ranks, in the cut for two ranks.
@reduced(
    cause="a KL or an entropy term that is a sum: the advantages are divided by the counts of the batch, and "
    "this term is not. Use the framework's own option (SkyRL: use_kl_loss, use_entropy_loss), or put the "
    "term into the advantages before they are divided",
    only_for=("skyrl", "tinker"),
)
def every_term_is_divided_as_the_advantages_are(setting: Setting) -> None:
    """The same rows have half the loss and gradient in a batch that has twice as many rows and tokens."""
    for options in BATCHES:
        batch = ragged(setting, **options)
        own = counts_of(batch)
        twice = own._replace(tokens=2 * own.tokens, rows=2 * own.rows)
        wanted = value_and_gradient(setting, batch, own)
        found = value_and_gradient(setting, batch, twice)
        for ours, one, what in zip(found, wanted, ("the loss", "the gradient"), strict=True):
            require_close(ours, one / 2, f"with half the advantages, as in a batch of twice the size, {what}")


@reduced()
def rows_may_come_in_any_order(setting: Setting) -> None:
    """The loss and the gradient of a row do not depend on its place in the batch."""
    for options in BATCHES:
        batch = ragged(setting, **options)
        order = torch.randperm(batch["mask"].shape[0], generator=torch.Generator().manual_seed(4))
        loss, gradient = value_and_gradient(setting, batch)
        shuffled, shuffled_gradient = value_and_gradient(setting, select_rows(batch, order))
        require_close(shuffled, loss, "the loss of another order of the rows")
        require_close(shuffled_gradient, gradient[order], "the gradient of another order of the rows")


@reduced()
def more_padding_changes_nothing(setting: Setting) -> None:
    """Masked columns of zeros at the end of every row change nothing."""
    for options in BATCHES:
        batch = ragged(setting, **options)
        columns = batch["mask"].shape[1]
        loss, gradient = value_and_gradient(setting, batch)
        for more in (3, 40 - columns):
            padded = pad_tokens(batch, more)
            padded |= {name: x.nan_to_num(0.0) for name, x in float_tensors(padded).items()}
            found, found_gradient = value_and_gradient(setting, padded)
            require_close(found, loss, f"with {more} more columns, the loss")
            require_close(found_gradient[:, :columns], gradient, f"with {more} more columns, the gradient")
