"""The laws on one number: how one is registered, and what it compares with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer_plugins.testing.assertions import tolerance
from composer_plugins.testing.conventions.reduced import counts_of, part, reduced_of
from composer_plugins.testing.gradients import with_trained_gradients
from composer_plugins.testing.inputs import Batch
from composer_plugins.testing.laws import LAWS, BrokenLaw, Law
from composer_plugins.testing.settings import Setting

TRAINED = "logprobs"
MAGNITUDE = 100.0  # of the largest term behind one number
REDUCED: dict[str, Law] = {}
ONLY_FOR: dict[str, tuple[str, ...]] = {}  # the frameworks of a law that is not for all of them

# Laws that are run as they are: they do not ask for the shape of a result.
SAME = (
    "two_calls_give_the_same_result",
    "policies_far_apart_give_finite_numbers",
    "advantages_of_any_size_give_finite_numbers",
    "descent_raises_the_tokens_with_positive_advantages",
)
ONE_NUMBER = "the function returns one number, and not one loss per token"
# Why the other laws of policy losses are not run.
NOT_RUN = {
    "result_has_one_value_per_token": ONE_NUMBER,
    "packed_tokens_equal_a_padded_row": "the convention has one layout",
    "rows_under_vmap_give_the_gradients_of_the_batch": ONE_NUMBER,
    "declared_gradient_is_the_one_that_it_has": "a function of this convention declares no gradient",
    "declared_statistic_of_the_batch_is_one": "a function of this convention declares nothing",
    "half_precision_is_upcast_before_anything_else": "the framework passes float32",
    "result_keeps_the_precision_of_its_inputs": "the framework passes float32",
    "batch_of_no_rows_or_no_tokens_gives_as_many_losses": "the framework passes at least one token",
    "torch_fx_traces_it": "the framework does not trace it",
    "torch_compile_takes_it_in_one_graph": "the framework does not compile it",
    "it_runs_on_tensors_without_numbers": "the framework does not compile it",
}


def reduced(
    cause: str = "", only_for: tuple[str, ...] = ()
) -> Callable[[Callable[[Setting], None]], Callable[[Setting], None]]:
    """Register a law on one number, for these frameworks alone if any is named.

    Without a cause it has that of the law of the same name on tokens.
    """

    def register(check: Callable[[Setting], None]) -> Callable[[Setting], None]:
        name, summary = check.__name__, (check.__doc__ or "").partition("\n")[0]
        found = cause or LAWS[name].cause
        REDUCED[name] = Law(name, summary, ("policy",), found, check, True, lambda loss: "")
        if only_for:
            ONLY_FOR[name] = only_for
        return check

    return register


def value_and_gradient(setting: Setting, batch: Batch, counts: Any = None) -> tuple[Tensor, Tensor]:
    """What the framework adds to its loss for a batch, and the gradient in the log-probabilities."""
    batch = with_trained_gradients(setting, batch)
    loss = part(setting, batch, counts or counts_of(batch))
    if not loss.requires_grad:
        return loss, torch.zeros_like(batch[TRAINED])
    (gradient,) = torch.autograd.grad(loss, batch[TRAINED], materialize_grads=True)
    return loss.detach(), gradient


def said(setting: Setting, name: str) -> str:
    """The framework's name of an input."""
    return reduced_of(setting).convention.names.get(name, name)


def require_close(
    ours: Tensor,
    wanted: Tensor,
    what: str,
    *,
    magnitude: float = MAGNITUDE,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Require equality within the roundings of a sum over a small batch, with one number in the message."""
    allowed = tolerance(dtype, 64, magnitude)
    wrong = ~((ours - wanted).abs() <= allowed) & ~(ours.isnan() & wanted.isnan()) & (ours != wanted)
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    where = f" at row {first[0]}, token {first[1]}" if wrong.dim() else ""
    count = f" ({int(wrong.sum())} of {wrong.numel()} numbers differ)" if wrong.dim() else ""
    found, one = float(ours[first]) + 0.0, float(wanted[first]) + 0.0  # 0, and not -0
    raise BrokenLaw(f"{what}{where} is {found:.6g}, and not {one:.6g}{count}")
