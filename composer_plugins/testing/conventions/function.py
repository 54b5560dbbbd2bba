"""`OneNumber`: a function of a framework's convention, which returns one number for a batch, as a subject."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function
from composer_plugins.errors import ConfigError
from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.derived import another_than_none, declared
from composer_plugins.losses.row import Loss, Parameter
from composer_plugins.testing.assertions import tolerance
from composer_plugins.testing.conventions.functional import signature_of
from composer_plugins.testing.inputs import DRAWS, Batch, draw, float_tensors, select_rows, tensors
from composer_plugins.testing.laws.results import has_effect
from composer_plugins.testing.settings import (
    THE_LOSS,
    Cut,
    Found,
    Setting,
    Signs,
    micro_batches_and_ranks,
    value_and_gradients,
    with_trained_gradients,
)

WIDTH = 11  # the longest response, where a convention has such a number
TRAINED = "logprobs"
MAGNITUDE = 100.0  # of the largest term behind one number
TERMS = 64


class Reduced:
    """A function and its convention, with the signature that a kernel of its inputs would have."""

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

    def __call__(self, *needed: Tensor, counts: Counts, **keywords: Any) -> Called:
        given = dict(zip(self.convention.needs, needed, strict=True))
        given |= {name: keywords.pop(name) for name in self.convention.optional if name in keywords}
        options = {name: values[0] for name, values in self.convention.options.items()} | keywords
        return self.convention.call(self.function, given, counts, options)


def row_of(function: Function, convention: Convention, name: str) -> Loss:
    """The row of a function: what the laws read of a loss. It is in no catalogue.

    Raises ConfigError for an attribute of the function that means nothing here.
    """
    attributes = declared(function, name, "check", gradient="surrogate")
    if attributes["over_batch"]:
        problem = f"{name} declares over_batch, and {convention.framework} cuts the batch all the same"
        raise ConfigError("check", problem, "remove it, or name the laws that do not hold in exceptions")
    if attributes["gradient"] == "score":  # of a loss per token
        attributes["gradient"] = "surrogate"
    own = {
        option: Parameter(f"of {name}", unchecked=True, example=another_than_none(parameter))
        for option, parameter in signature_of(function).parameters.items()
        if option in convention.parameters
    }
    options = {
        option: Parameter(f"of {convention.framework}", choices=values)
        for option, values in convention.options.items()
    }
    return Loss(
        name=name,
        kind="policy",
        summary="",
        paper="",
        proof="",
        needs=convention.needs,
        optional=convention.optional,
        parameters=options | own,
        mode="token-mean",
        **attributes,
        function=cast(Function, Reduced(function, convention)),
    )


def counts_of(batch: Mapping[str, Any], parts: int = 1, ranks: int = 1) -> Counts:
    """The counts of a whole batch."""
    mask = batch["mask"]
    return Counts(int(mask.sum()), mask.shape[0], parts, ranks, WIDTH)


@dataclass(frozen=True)
class OneNumber(Setting):
    """A function that returns one number for a batch, called in one way: a setting of `row_of`.

    Its batches are ragged: rows of different lengths, with masked tokens within them and one row that is
    masked out. A part of a batch is padded to the longest of its rows alone, as frameworks pad a micro-batch.
    """

    one_number: ClassVar[bool] = True

    @property
    def convention(self) -> Convention:
        """How the framework calls it."""
        return cast(Reduced, self.loss.function).convention

    def draw(self, seed: int = 0, **options: Any) -> Batch:
        """Draw rows of different lengths."""
        batch = draw(self.inputs, seed, **options)
        rows, columns = batch["mask"].shape
        generator = torch.Generator().manual_seed(seed + 100)
        lengths = torch.randint(1, columns + 1, (rows, 1), generator=generator)
        lengths[0] = columns
        mask = batch["mask"] & (torch.arange(columns) < lengths)
        mask[0, 0] = True
        wide = {name: x.expand(rows, columns).clone() for name, x in tensors(batch).items()}
        return batch | wide | {"mask": mask}

    def batches(self, to_be_cut: bool = False) -> list[Batch]:
        """Several batches of random numbers; no row of those that are `to_be_cut` is masked out."""
        equal = to_be_cut and self.convention.equal_parts
        found = [
            self.draw(**one | ({"size": 8 if one is DRAWS[-1] else 4} if equal else {})) for one in DRAWS
        ]
        for batch in found if to_be_cut else ():
            batch["mask"][:, 0] = True
        return found

    def called(self, batch: Batch, counts: Counts | None = None, seed: int = 0) -> Called:
        """One call with these tensors, whose masks are not expanded, and with this seed of torch.

        The seed is the same in every law but one, so that random numbers break that one only.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found: Called = call_unchecked(self.choice, batch, counts=counts or counts_of(batch))
        return found

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """What the framework adds to its loss for these rows."""
        return self.called({**batch}).loss

    def result(self, batch: Mapping[str, Any], whole: Batch | None = None) -> Tensor:
        """What the framework adds to its loss for these rows, perhaps as some of a larger batch."""
        return self.called(copies({**batch}), counts_of(whole or batch)).loss

    def run(
        self,
        batch: Batch,
        *,
        cut: Cut | None = None,
        seed: int | None = None,
        weighted: bool = False,
        times: int = 1,
    ) -> Found:
        """The loss and the gradient in the log-probabilities; of a cut, the sums over its parts.

        With `times` the batch is a part of one with that many times as many rows and tokens.
        """
        own = with_trained_gradients(self, batch)
        parts, ranks = ([own], 1) if cut is None else ([rows_of(own, rows) for rows in cut.parts], cut.ranks)
        counts = counts_of(batch, len(parts) // ranks, ranks)
        counts = counts._replace(tokens=times * counts.tokens, rows=times * counts.rows)
        loss = torch.stack([self.called(copies(part), counts, seed or 0).loss for part in parts]).sum()
        gradient = torch.zeros_like(own[TRAINED])
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, own[TRAINED], materialize_grads=True)
        return {THE_LOSS: loss.detach(), "the gradient": gradient}

    def allowed(self, wanted: Tensor, dtype: torch.dtype) -> float:
        """The difference that rounding explains: of a sum over a small batch, whose terms may cancel."""
        dtype = self.convention.precision or dtype
        magnitude = 10 * max(1.0, float(wanted.abs().max())) if dtype is torch.float32 else MAGNITUDE
        return tolerance(dtype, TERMS, magnitude)

    def cuts(self, batch: Batch) -> Iterator[Cut]:
        """Yield 1, 2 and 4 micro-batches, and two ranks."""
        rows = len(batch["mask"])
        return micro_batches_and_ranks(rows, rows, self.convention.equal_parts)

    def problems(self, batch: Batch) -> tuple[str, ...]:
        """What is wrong with the result, although the loss itself can be used."""
        return self.called(copies(batch)).problems

    @cached_property
    def uses_advantages(self) -> bool:
        """Whether it learns from advantages.

        Those of a distillation change nothing, or act on its clip alone: where all policies are equal, it has
        no gradient.
        """
        if "advantages" not in self.inputs or not has_effect(self, "advantages"):
            return False
        return any(bool(one.raised.any() or one.negated.any()) for one in super().both_signs())

    def both_signs(self) -> Iterator[Signs]:
        """Yield what descent raises; without advantages, with a reference that is not equal."""
        if self.uses_advantages or "advantages" not in self.inputs:
            yield from super().both_signs()
            return
        for options in DRAWS:  # a distillation learns from a reference that is not equal
            apart, equal = self.draw(**options), self.draw(**options | {"spread": 0.0})
            batch = equal | {name: apart[name] for name in apart.keys() & {"ref_logprobs"}}
            raised = -value_and_gradients(self, batch)[1][TRAINED]
            yield Signs(batch["mask"], batch["advantages"][:, 0], raised, raised)

    def misspelt(self) -> Iterator[str]:
        """Yield a sentence for each option of the framework that is read by a misspelt name."""
        for option, values in self.convention.options.items():
            for value in values:
                other = replace(self, choice=replace(self.choice, params={**self.params, option: value}))
                yield from other.called(copies(self.draw())).misspelt

    def must_have_effect(self) -> list[str]:
        """The inputs that must be used: a user's option switches them on."""
        return [name for name in self.convention.must_use if name in self.inputs]

    def poisonable(self, batch: Batch) -> list[str]:
        """The inputs in which NaN at a token must be seen: those that the function uses."""
        return [name for name in float_tensors(batch) if has_effect(self, name)]

    def named(self, name: str) -> str:
        """The framework's name of an input."""
        return self.convention.names.get(name, name)


def copies(batch: Batch) -> Batch:
    """Copies of the tensors, which are not leaves of autograd, like a framework's."""
    return {name: x.expand(batch["mask"].shape).clone() for name, x in batch.items()}


def rows_of(batch: Batch, index: Tensor) -> Batch:
    """Some rows, without the columns at their end in which every token is masked out."""
    rows = select_rows(batch, index)
    columns = rows["mask"].any(0).nonzero()
    last = int(columns[-1]) + 1 if len(columns) else 1
    return {name: x[:, :last] for name, x in rows.items()}
