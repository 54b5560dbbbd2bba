"""`Reduced`: a function of a framework's convention as a kernel that returns one number for a batch."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from composer_plugins.convention import Called, Convention, Counts, Function
from composer_plugins.errors import ConfigError
from composer_plugins.losses.calling import versions
from composer_plugins.losses.derived import declared
from composer_plugins.losses.row import Loss, Parameter
from composer_plugins.testing.inputs import Batch, draw, expand_mask, select_rows, tensors
from composer_plugins.testing.laws.tokens import DRAWS as TOKEN_DRAWS
from composer_plugins.testing.settings import Setting

WIDTH = 11  # the longest response, where a convention has such a number
LONG: dict[str, Any] = {"seed": 4, "size": 9, "tokens": WIDTH, "unmasked": 0.95}
BATCHES = [*TOKEN_DRAWS[:3], LONG]  # with several rows
DRAWS = [*BATCHES, *TOKEN_DRAWS[3:]]


class Reduced:
    """A function and its convention; called as a kernel is, it returns the loss of the whole batch."""

    def __init__(self, function: Function, convention: Convention) -> None:
        self.function, self.convention = function, convention
        kind = inspect.Parameter
        options = {name: values[0] for name, values in convention.options.items()}
        keywords = {name: None for name in convention.optional} | options | dict(convention.parameters)
        self.__signature__ = inspect.Signature(
            [
                *(kind(name, kind.POSITIONAL_OR_KEYWORD) for name in convention.needs),
                *(kind(name, kind.KEYWORD_ONLY, default=value) for name, value in keywords.items()),
            ]
        )

    def __call__(self, *needed: Tensor, **keywords: Any) -> Tensor:
        given = dict(zip(self.convention.needs, needed, strict=True))
        given |= {name: keywords.pop(name) for name in self.convention.optional if name in keywords}
        return self.part(given, counts_of(given), keywords)

    def part(self, batch: Mapping[str, Any], counts: Counts, options: Mapping[str, Any]) -> Tensor:
        """What the framework adds to its loss for these rows."""
        return self.called(batch, counts, options)[0].loss

    def called(
        self, batch: Mapping[str, Any], counts: Counts, options: Mapping[str, Any]
    ) -> tuple[Called, list[str]]:
        """One call with copies of the tensors, and the names of those that the function wrote to.

        The copy of the log-probabilities is no leaf of autograd, as a framework's are not.
        """
        shape = batch["mask"].shape
        defaults = {name: values[0] for name, values in self.convention.options.items()}
        given = {name: x.expand(shape).clone() for name, x in batch.items()}
        before = versions(given)
        found = self.convention.call(self.function, given, counts, defaults | dict(options))
        return found, [name for name, version in versions(given).items() if version != before[name]]


def row_of(function: Function, convention: Convention, name: str) -> Loss:
    """The row of a function: what the laws read of a loss. It is in no catalogue.

    Raises ConfigError for an attribute of the function that means nothing here.
    """
    attributes = declared(function, name, "check", gradient="surrogate")
    if attributes["over_batch"]:
        problem = f"{name} declares over_batch, and {convention.framework} cuts the batch all the same"
        raise ConfigError("check", problem, "remove it, or name the laws that do not hold in exceptions")
    own = {option: Parameter(f"of {name}", unchecked=True) for option in convention.parameters}
    return Loss(
        name=name,
        kind="policy",
        summary="",
        paper="",
        proof="",
        needs=convention.needs,
        optional=convention.optional,
        parameters={
            option: Parameter(f"of {convention.framework}", choices=values)
            for option, values in convention.options.items()
        }
        | own,
        mode="token-mean",
        **attributes,
        function=cast(Function, Reduced(function, convention)),
    )


def reduced_of(setting: Setting) -> Reduced:
    """The function of a setting of `row_of`."""
    found = setting.loss.function
    assert isinstance(found, Reduced)
    return found


def part(setting: Setting, batch: Batch, counts: Counts) -> Tensor:
    """What the framework adds to its loss for these rows, in this setting; torch's own seed is the same.

    A law has its own name for random numbers, and the others are not about them.
    """
    given = {name: batch[name] for name in setting.inputs}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return reduced_of(setting).part(given, counts, setting.params)


def counts_of(batch: Mapping[str, Any], parts: int = 1, ranks: int = 1) -> Counts:
    """The counts of a whole batch."""
    mask = batch["mask"]
    return Counts(int(mask.sum()), mask.shape[0], parts, ranks, WIDTH)


def ragged(setting: Setting, **options: Any) -> Batch:
    """Drawn rows of different lengths, with masked tokens within them and one row that is masked out."""
    batch = draw(setting, **options)
    mask = batch["mask"]
    rows, columns = mask.shape
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 100)
    lengths = torch.randint(1, columns + 1, (rows, 1), generator=generator)
    lengths[0] = columns
    mask = mask & (torch.arange(columns) < lengths)
    if options.get("unmasked", 0.7) > 0:
        mask[0, 0] = True
    return (
        batch | {name: x.expand(rows, columns).clone() for name, x in tensors(batch).items()} | {"mask": mask}
    )


def trimmed(batch: Batch) -> Batch:
    """The batch without the columns at its end in which every token is masked out."""
    columns = batch["mask"].any(0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 1
    return {name: x[:, :last] for name, x in batch.items()}


def rows_of(batch: Batch, index: Tensor) -> Batch:
    """Some rows, padded to the longest of them alone, as frameworks pad a micro-batch."""
    return trimmed(select_rows(batch, index))


def masked_with(batch: Batch, values: Tensor) -> Batch:
    """The batch with these values in turn wherever the mask is False, in every other input."""
    mask = batch["mask"]
    filled = {}
    for name, x in tensors(batch).items():
        if name != "mask":
            junk = values.to(x.dtype).repeat(x.numel())[: x.numel()].view(x.shape)
            filled[name] = torch.where(expand_mask(mask, x), x.detach(), junk)
    return batch | filled
