"""Every way to call a loss: its defaults, its optional inputs, its dialects, each parameter changed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import REQUIRED, Loss, Parameter, Value

VOCABULARY = 5  # a drawn vocabulary has at least as many entries, except where a test asks for fewer

# The inputs of a loss into which a gradient flows. Into every other input it must not.
TRAINED = {
    *("logprobs", "support_logprobs", "logits", "student_logits", "student_logprobs", "token_loss"),
    *("chosen", "rejected", "chosen_nll", "gold_nll", "scores"),
}
# Optional inputs that replace another input, or that need group ids of a certain form.
GENERATOR, UNIFORM, NUM_GROUPS = "generator", "uniform", "num_groups"


@dataclass(frozen=True)
class Setting:
    """One way to call a loss: its parameters and its optional inputs, under a name."""

    choice: Choice
    label: str

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

    def result(self, batch: Mapping[str, Any]) -> Tensor:
        """Call the kernel and return the loss, the advantages or the weights."""
        return main_tensor(self(batch))

    def within(self, vocabulary: int) -> "Setting":
        """This setting with a `top_k` that fits a vocabulary of that size."""
        k = self.choice.value("top_k")
        if k is None or k <= vocabulary:
            return self
        return replace(self, choice=replace(self.choice, params={**self.params, "top_k": vocabulary}))


def main_tensor(result: Any) -> Tensor:
    """The loss of a TokenLoss or PairLoss, the first field of another tuple, a tensor as it is."""
    if isinstance(result, Tensor):
        return result
    tensor: Tensor = result.loss if hasattr(result, "loss") else result[0]
    return tensor


def settings(loss: Loss, *, thorough: bool = True) -> Iterator[Setting]:
    """Yield a loss with its defaults, with its optional inputs, and if thorough as each variant of it."""
    return (setting.within(VOCABULARY) for setting in _settings(loss, thorough))


def _settings(loss: Loss, thorough: bool) -> Iterator[Setting]:
    base = {name: sample(loss.parameters[name]) for name, d in loss.defaults.items() if d is REQUIRED}
    for dialect in loss.dialects:  # a published number is the best one for a required parameter
        base |= {name: value for name, value in dialect.params.items() if name in base}
    left_out = {GENERATOR} if UNIFORM in loss.optional else set()
    optional = tuple(name for name in loss.optional if name not in {*left_out, NUM_GROUPS})
    least = (UNIFORM,) if UNIFORM in optional else ()

    def setting(
        label: str,
        passed: tuple[str, ...] = optional,
        params: Mapping[str, Value] | None = None,
    ) -> Setting:
        return Setting(Choice(loss, base | dict(params or {}), optional=passed), f"{loss.name}{label}")

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
            yield setting(f"@{dialect.upstream}", params=dialect.params)
    for name, parameter in loss.parameters.items():
        default = loss.defaults.get(name)
        others: list[Any] = [choice for choice in parameter.choices if choice != default]
        if not parameter.choices and default is None:
            others = [sample(parameter)]
        for other in others:
            yield setting(f"({name}={other!r})", params={name: other})


def several(parameter: Parameter, value: Any) -> list[Any]:
    """`value` and others in the range of its parameter; `value` alone where no other is known."""
    if parameter.choices:
        return list(parameter.choices)
    if isinstance(value, bool):
        return [value, not value]
    if value is None and not parameter.unchecked:
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
