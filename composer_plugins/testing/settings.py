"""Every way to call a loss: its defaults, its optional inputs, its dialects, each parameter changed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from composer_plugins.losses.calling import call_unchecked, versions
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.inputs import INPUTS, PAIRS, ROWS, TOKENS, TOP_K, VOCAB
from composer_plugins.losses.row import REQUIRED, Loss, Parameter, Value
from composer_plugins.testing.assertions import largest_number, tolerance
from composer_plugins.testing.inputs import (
    DRAWS,
    FINITE,
    GENERATOR,
    NUM_GROUPS,
    UNIFORM,
    Batch,
    draw,
    float_tensors,
    pad_tokens,
    select_rows,
    with_junk,
)
from composer_plugins.testing.law import Check, NotApplicable, require, require_close

VOCABULARY = 5  # a drawn vocabulary has at least as many entries, except where a test asks for fewer

# The inputs of a loss into which a gradient flows. Into every other input it must not.
TRAINED = {
    *("logprobs", "support_logprobs", "logits", "student_logits", "student_logprobs", "token_loss"),
    *("chosen", "rejected", "chosen_nll", "gold_nll", "scores"),
}
# Inputs whose numbers are an order or a count: another number may mean the same.
LABELS = {"group_ids", NUM_GROUPS, GENERATOR, "mask", "component_mask", "desirable"}
SHAPES = (TOKENS, VOCAB, TOP_K)  # of inputs with numbers at each token

THE_LOSS = "the loss"  # of what a run gives; the names of the rest say which gradients they are
Found = dict[str, Tensor]


class Cut(NamedTuple):
    """A batch in parts: micro-batches of a step, or the rows of each rank."""

    what: str  # "2 micro-batches of 4 rows"
    parts: list[Tensor]  # the rows of each part
    ranks: int = 1


class Signs(NamedTuple):
    """How far descent raises each token of a batch, with its advantages and with their negatives."""

    mask: Tensor  # [rows, tokens]
    advantages: Tensor  # [rows] or [rows, tokens]
    raised: Tensor  # [rows, tokens]
    negated: Tensor  # [rows, tokens]: with the advantages negated


@dataclass(frozen=True)
class Setting:
    """One way to call a kernel: its parameters and its optional inputs, under a name ("cispo@trl").

    The laws are about it. A function that returns one number is a `conventions.function.OneNumber`.
    """

    choice: Choice
    label: str
    one_number: ClassVar[bool] = False  # whether it is one of a function that returns one number for a batch

    @property
    def loss(self) -> Loss:
        """The row of the catalogue."""
        return self.choice.loss

    @property
    def params(self) -> Mapping[str, Value]:
        """The parameters that it sets."""
        return self.choice.params

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that it is called with."""
        return (*self.loss.needs, *self.choice.optional)

    @property
    def trained(self) -> tuple[str, ...]:
        """The inputs that get a gradient."""
        return tuple(name for name in self.inputs if name in TRAINED and name not in self.loss.detached)

    def with_values_of(self, name: str) -> Iterator["Setting"]:
        """Yield this setting with several values of a parameter, where it acts."""
        parameter = self.loss.parameters[name]
        other, *values = parameter.only_with or (name,)
        acts: dict[str, Any] = {}
        if other != name and self.choice.value(other) not in values:
            acts = {other: values[0] if values else sample(self.loss.parameters[other])}
        for value in several(parameter, self.choice.value(name)):
            choice = replace(self.choice, params={**self.params, **acts, name: value})
            yield replace(self, choice=choice, label=f"{self.label}({name}={value!r})").within(VOCABULARY)

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        """Call the kernel unchecked; a seed stands for a new generator: two calls draw the same numbers."""
        seeds = {name: batch[name] for name in batch if name == GENERATOR}
        generators = {name: torch.Generator().manual_seed(seed) for name, seed in seeds.items()}
        return call_unchecked(self.choice, {**batch, **generators})

    def result(self, batch: Mapping[str, Any], whole: Batch | None = None) -> Tensor:
        """Call the kernel and return the loss, the advantages or the weights.

        With `whole` these are some rows of that batch, which means nothing to a kernel: it does not divide.
        """
        return main_tensor(self(batch))

    def draw(self, seed: int = 0, **options: Any) -> Batch:
        """Draw every input (`inputs.draw`)."""
        return draw(self.inputs, seed, **options)

    def batches(self, to_be_cut: bool = False) -> list[Batch]:
        """Several batches of random numbers; with `to_be_cut` those that can be taken in parts."""
        return [self.draw(**options) for options in DRAWS]

    def run(
        self, batch: Batch, *, cut: Cut | None = None, seed: int | None = None, weighted: bool = False
    ) -> Found:
        """The loss and the gradient in each trained input; of a cut, those of its parts, put together.

        `seed` is that of torch's own random numbers. With `weighted` the gradient is that of a sum in which
        each token has a weight of its own.
        """
        if cut is not None:
            found = [self.run(select_rows(batch, rows)) for rows in cut.parts]
            order = torch.cat(cut.parts).argsort()
            return {name: torch.cat([one[name] for one in found])[order] for name in found[0]}
        generator, weight = torch.Generator().manual_seed(1), None
        if weighted:
            weight = torch.randn(batch["mask"].shape, generator=generator, dtype=torch.float64)
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            loss, gradients = value_and_gradients(self, batch, weight)
        return {THE_LOSS: loss} | {f"the gradient of {name!r}": x for name, x in gradients.items()}

    def allowed(self, wanted: Tensor, dtype: torch.dtype) -> float:
        """The difference that rounding explains: of a token, whose longest sum is one over its row."""
        magnitude = largest_number(wanted)
        if dtype is torch.float32:
            # A log ratio cancels: its rounding is that of the log-probabilities, and a slope magnifies it.
            magnitude = 10 * max(1.0, magnitude)
        return tolerance(dtype, wanted.shape[1] if wanted.dim() > 1 else 4, magnitude)

    def compare(
        self,
        ours: Found,
        wanted: Found,
        what: str,
        *,
        exactly: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        """Raise BrokenLaw unless two runs agree, within the roundings of a dtype or bit for bit.

        `what` is a phrase with {} for the loss or a gradient: "with 3 more columns, {}".
        """
        for name, one in wanted.items():
            require_close(ours[name], one, 0.0 if exactly else self.allowed(one, dtype), what.format(name))

    def cuts(self, batch: Batch) -> Iterator[Cut]:
        """Yield 1, 2 and 4 micro-batches, and two ranks."""
        rows = len(batch[self.trained[0]])
        return micro_batches_and_ranks(rows, rows)

    def masked(self, batch: Batch, junk: Tensor | None = None) -> Iterator[tuple[str, Batch]]:
        """Yield the batch with `junk` at the masked tokens of one input after the other."""
        mask, junk = batch["mask"], FINITE if junk is None else junk
        for name, x in float_tensors(batch).items():
            if INPUTS[name].shape in SHAPES and x.shape[: mask.dim()] == mask.shape:
                dirty = batch | {name: with_junk(x, mask, junk)}
                yield f"with other numbers at masked tokens of {self.named(name)}", dirty

    def padded(self, batch: Batch) -> Iterator[tuple[str, Batch]]:
        """Yield the batch with masked columns at its end, up to 40 tokens in all."""
        for more in (3, 40 - batch["mask"].shape[1]):
            yield f"with {more} more columns", pad_tokens(batch, more, 0.0)

    def both_signs(self) -> Iterator[Signs]:
        """Yield what descent raises where all policies are equal, and the advantages of a row 1 or -1."""
        if self.trained != ("logprobs",):
            raise NotApplicable("its policy input is not logprobs")
        for options in DRAWS:
            batch = self.draw(**options | {"spread": 0.0})
            rows = 1.0 - 2 * (torch.arange(len(batch["mask"]), dtype=torch.float64) % 2)
            signed = [sign * rows[:, None].expand_as(batch["mask"]) for sign in (1, -1)]
            given = [batch | ({"advantages": x} if "advantages" in batch else {}) for x in signed]
            raised, negated = (-value_and_gradients(self, one)[1]["logprobs"] for one in given)
            yield Signs(batch["mask"], rows, raised, negated)

    def written(self, batch: Batch) -> list[str]:
        """The inputs that a call writes to."""
        given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.items()}
        before = versions(given)
        self(given)
        now = versions(given)
        return [n for n in before if now[n] != before[n] or not torch.equal(given[n], batch[n])]

    def misspelt(self) -> Iterator[str]:
        """Yield a sentence for each option of a framework that is read by a misspelt name."""
        yield from ()

    def must_have_effect(self) -> list[str]:
        """The inputs that must be used."""
        drawn = float_tensors(self.draw())
        return [name for name in drawn if name not in LABELS and INPUTS[name].shape != "[components]"]

    def poisonable(self, batch: Batch) -> list[str]:
        """The inputs in which NaN at a token, a row or a pair must be seen."""
        shapes = (PAIRS, ROWS) if self.loss.kind == "preference" else SHAPES
        return [name for name in float_tensors(batch) if INPUTS[name].shape in shapes and name != UNIFORM]

    def named(self, name: str) -> str:
        """An input in a message."""
        return repr(name)

    def within(self, vocabulary: int) -> "Setting":
        """This setting with a `top_k` that fits a vocabulary of that size."""
        k = self.choice.value("top_k")
        if k is None or k <= vocabulary:
            return self
        return replace(self, choice=replace(self.choice, params={**self.params, "top_k": vocabulary}))


def micro_batches_and_ranks(rows: int, seed: int, equal: bool = False) -> Iterator[Cut]:
    """Yield rows as 1, 2 and 4 micro-batches, of equal sizes or cut at random places, and as two ranks."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(rows)
    for number in (1, 2, 4):
        ends = torch.randperm(max(rows - 1, 0), generator=generator)[: number - 1].sort().values + 1
        parts = index.chunk(number) if equal else torch.tensor_split(index, ends.tolist())
        kept = [part for part in parts if len(part)]
        yield Cut(f"{len(kept)} micro-batches of {rows} rows", kept)
    ranks = [part for part in (index[::2], index[1::2]) if len(part)]
    yield Cut(f"{len(ranks)} ranks of {rows} rows", ranks, len(ranks))


def with_trained_gradients(setting: Setting, batch: Batch) -> Batch:
    """The batch with `requires_grad` on copies of the inputs that the setting trains."""
    return batch | {name: batch[name].detach().clone().requires_grad_() for name in setting.trained}


def with_all_gradients(batch: Batch) -> Batch:
    """The batch with `requires_grad` on copies of all floating-point tensors."""
    return batch | {name: x.detach().clone().requires_grad_() for name, x in float_tensors(batch).items()}


def value_and_gradients(
    setting: Setting, batch: Batch, weight: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result, and the gradient of its sum (weighted by `weight`) in each trained input."""
    batch = with_trained_gradients(setting, batch)
    result = setting.result(batch)
    total = (result if weight is None else torch.where(result == 0, 0.0, weight) * result).sum()
    wanted = {name: batch[name] for name in setting.trained}
    if not total.requires_grad:
        return result, {name: torch.zeros_like(x) for name, x in wanted.items()}
    found = torch.autograd.grad(total, list(wanted.values()), materialize_grads=True)
    return result.detach(), dict(zip(wanted, found, strict=True))


def draw_pairs(setting: Setting) -> Batch:
    """Draw three rows without masked tokens, each of them twice, and all policies of a row equal."""
    batch = setting.draw(size=3, spread=0.0, unmasked=1.0)
    same = [name for name in batch if name.endswith("_logprobs") and INPUTS[name].shape == TOKENS]
    batch |= {name: batch[setting.trained[0]].clone() for name in same}
    return select_rows(batch, torch.arange(3).repeat_interleave(2))


def main_tensor(result: Any) -> Tensor:
    """The loss of a TokenLoss or PairLoss, the first field of another tuple, a tensor as it is."""
    if isinstance(result, Tensor):
        return result
    tensor: Tensor = result.loss if hasattr(result, "loss") else result[0]
    return tensor


def settings(loss: Loss, *, thorough: bool = True, of: type[Setting] = Setting) -> Iterator[Setting]:
    """Yield a loss with its defaults, with its optional inputs, and if thorough as each variant of it."""
    base = {name: sample(loss.parameters[name]) for name, d in loss.defaults.items() if d is REQUIRED}
    for dialect in loss.dialects:  # a published number is the best one for a required parameter
        base |= {name: value for name, value in dialect.params.items() if name in base}
    left_out = {GENERATOR} if UNIFORM in loss.optional else set()
    optional = tuple(name for name in loss.optional if name not in {*left_out, NUM_GROUPS})
    least = (UNIFORM,) if UNIFORM in optional else ()

    def setting(label: str, passed: tuple[str, ...] = optional, /, **params: Value) -> Setting:
        choice = Choice(loss, base | params, optional=passed)
        return of(choice, f"{loss.name}{label}").within(VOCABULARY)

    yield setting("", least)
    if optional != least:
        yield setting(f"+{'+'.join(optional)}")
    if not thorough:
        if NUM_GROUPS in loss.optional:
            yield setting(f"+{NUM_GROUPS}", (*optional, NUM_GROUPS))
        return
    if GENERATOR in loss.optional:
        yield setting(f"+{GENERATOR}", (GENERATOR,))
    for dialect in loss.dialects:
        if dialect.params:
            yield setting(f"@{dialect.upstream}", **dialect.params)
    for name, parameter in loss.parameters.items():
        default = loss.defaults.get(name)
        others: list[Any] = [choice for choice in parameter.choices if choice != default]
        if not parameter.choices and default is None:
            others = [sample(parameter)]
        for other in others:
            yield setting(f"({name}={other!r})", **{name: other})


def require_one_without(setting: Setting, law: Check, problem: str) -> None:
    """Require that a row breaks a law, which it declares to break, in one of its settings."""
    if setting.label != setting.loss.name:
        raise NotApplicable("one of its settings is enough")
    for one in settings(setting.loss):
        try:
            law(one)
        except AssertionError:
            return
    require(False, problem)


def several(parameter: Parameter, value: Any) -> list[Any]:
    """`value` and others in the range of its parameter; `value` alone where no other is known."""
    if parameter.choices:
        return list(parameter.choices)
    if isinstance(value, bool):
        return [value, not value]
    if value is None and (parameter.example is not None or not parameter.unchecked):
        others = [sample(parameter)]
    elif isinstance(value, int) and (parameter.integer or parameter.unchecked):
        others = [value + 1, value - 1]
    elif isinstance(value, float | int):
        others = [1.5 * value + 0.1, 0.7 * value, 0.9]
    else:
        return [value]
    return [value, *(one for one in others if parameter.low <= one <= parameter.high)]


def sample(parameter: Parameter) -> Any:
    """A value inside the range of a parameter, not at its ends."""
    if parameter.example is not None:
        return parameter.example
    if parameter.choices:
        return parameter.choices[0]
    low, high = max(parameter.low, -1e300), min(parameter.high, 1e300)
    if parameter.integer:
        return int(max(low, min(high, 2)))
    if math.isfinite(parameter.low) and math.isfinite(parameter.high):
        return (low + high) / 2
    if parameter.low_open:  # most often a cap, of a ratio or of a log ratio
        return min(1.5, high)
    return low + 0.5 if math.isfinite(parameter.low) else min(high - 0.5, 0.5)
