"""Lantern's tensors -> a loss of the catalogue -> Lantern's denominator."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function, scalar_problems
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call
from composer_plugins.objective.resolve import resolve


class Loss:
    """The loss that Lantern's trainer calls with each part of a batch. The config is read once, here."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.objective = resolve("lantern", config).required()

    def __call__(self, new: Tensor, old: Tensor, credit: Tensor, keep: Tensor, totals: Counts) -> Tensor:
        """The loss [] of one part: the parts of a batch add up, because `totals` are of the whole batch."""
        given = {"logprobs": new, "old_logprobs": old, "advantages": credit, "mask": keep}
        token = call(self.objective.policy, given)
        counts = {"num_tokens": totals.tokens, "num_sequences": totals.rows}
        mean: Tensor = aggregate(token.loss, keep, self.objective.mode, **counts)  # type: ignore[arg-type]
        return mean


def call_lantern(
    function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
) -> Called:
    """Call a user's function as Lantern does: it returns a sum, which is divided by the batch's tokens."""
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    total = function(*(tensors[name] for name in names))
    return Called(total / counts.tokens, scalar_problems(total))


CONVENTION = Convention(
    framework="lantern",
    signature="fn(new, old, credit, keep)",
    returns="the sum over the unmasked tokens, with a gradient",
    call=call_lantern,
    names={"logprobs": "new", "old_logprobs": "old", "advantages": "credit", "mask": "keep"},
)
