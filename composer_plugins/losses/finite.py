"""The error for a loss that is not finite, with the input that it comes from."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from composer_plugins.errors import DataError
from composer_plugins.losses.flags import Flags

# By the input of a loss that is not finite, what to look at.
GRADIENTS = "look at the norm of the gradient in the steps before this one"
WEIGHTS = "look for weights that are not finite in the {} of this run"
REMEDIES = {
    "advantages": "look at the rewards of this batch",
    "rollout_logprobs": "look at the log-probabilities that the rollout engine returned",
    "ref_logprobs": WEIGHTS.format("reference"),
    "teacher_logprobs": WEIGHTS.format("teacher"),
}


def not_finite(inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the name of each input with an unmasked value that is not finite, and where its first one is.

    `inputs["mask"]` says which elements count.
    """
    for name, tensor in inputs.items():
        values, wrong = _wrong(tensor, inputs["mask"])
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "token"), first, strict=False))
            count = f"{int(wrong.sum())} of {int(torch.broadcast_to(inputs['mask'], wrong.shape).sum())}"
            shown = f"the first ({float(values[*first])}) at {place}"
            yield name, f"{count} values of {name} are not finite, {shown}"


class FiniteCheck:
    """Raises DataError at `key` for a loss that was not finite, without waiting for the device.

    On a GPU the error comes a call or more later, when the device has computed the flags.
    """

    def __init__(self, key: str) -> None:
        self.key, self.flags = key, Flags()

    def __call__(self, loss: Tensor, inputs: Mapping[str, Tensor]) -> None:
        """Look at this loss [] and at its inputs [rows, tokens], which have the same names at every call."""
        wrong = [_wrong(x, inputs["mask"])[1].any() for x in inputs.values()]
        for found in self.flags.read(torch.stack([~loss.detach().isfinite(), *wrong])):
            loss_is_wrong, *inputs_are_wrong = found.tolist()
            if loss_is_wrong:
                names = [name for name, is_wrong in zip(inputs, inputs_are_wrong, strict=True) if is_wrong]
                raise loss_not_finite(self.key, names[0] if names else "")


def loss_not_finite(key: str, name: str, problem: str = "") -> DataError:
    """The error for a loss that is not finite; `name` is the input that is not, "" where all are finite."""
    if not name:
        problem = "the loss is not finite, and all its inputs are, so it overflows"
        return DataError(key, problem, GRADIENTS)
    problem = problem or f"{name} is not finite at an unmasked token"
    return DataError(key, f"the loss is not finite, because {problem}", REMEDIES.get(name, GRADIENTS))


def _wrong(tensor: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The values, broadcast against the mask, and where an unmasked one is not finite."""
    values, where = torch.broadcast_tensors(tensor.detach(), mask)
    return values, where & ~values.isfinite()
