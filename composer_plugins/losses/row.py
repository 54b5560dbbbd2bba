"""A loss as data: which kernel, from which paper, with which parameters, called with which inputs.

A row loads nothing: `Loss.kernel()` and `Loss.defaults` import torch. The bundled rows are registered through
the same pluggy hook as a third party's (`hookspecs.py`).
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from composer_plugins.errors import ConfigError, Finding, Findings, enforce, unknown

MAX = sys.float_info.max

Kind = Literal["policy", "advantage", "divergence", "preference", "kl", "correction", "aggregation"]
Value = float | int | str | bool | None


class KindNames(NamedTuple):
    """The words for a kind of loss, its module in composer_plugins.kernels, and the option that names one."""

    singular: str
    plural: str
    module: str
    option: str = ""


KINDS: dict[str, KindNames] = {
    "policy": KindNames("a policy loss", "policy losses", "policy", "policy"),
    "advantage": KindNames("an advantage", "advantages", "advantages", "advantage"),
    "divergence": KindNames("a divergence", "divergences", "divergences", "hint_divergence"),
    "preference": KindNames("a preference loss", "preference losses", "preference", "replay_loss"),
    "kl": KindNames("a KL estimator", "KL estimators", "kl"),
    "correction": KindNames("a rollout correction", "rollout corrections", "corrections"),
    "aggregation": KindNames("an aggregation mode", "aggregation modes", "aggregation"),
}


# The aggregation modes: how a loss per token is reduced, by the names of the kind's rows.
NORM = "seq-mean-token-sum-norm"  # the only mode with a constant
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)


# What the gradient of a loss is (`Loss.gradient`), in words.
GRADIENTS = {
    "derivative": "",
    "score": "of a detached weight times log pi(y_t), not the derivative of the value",
    "surrogate": "not the derivative of the value: see the docstring",
}


class Unlikely(NamedTuple):
    """Values of a parameter that are in its range and that hardly anyone intends: a warning."""

    above: float  # those between these two, without them
    below: float
    effect: str  # what such a value does: "clips the ratio above {ratio:g}", which is 1 + value
    remedy: str  # with what papers and frameworks set


@dataclass(frozen=True)
class Parameter:
    """A keyword parameter of a kernel: a number in a range, or one of several choices.

    The default is the one in the kernel's signature (`Loss.defaults`). None is accepted only where it is
    the default.
    """

    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str | bool, ...] = ()
    integer: bool = False
    example: Any = None  # a value for `explain`, where the kernel has no default
    unchecked: bool = False  # of a loss named by import path: only its type is known
    unlikely: tuple[Unlikely, ...] = ()
    weighs_a_penalty: bool = False  # whether it multiplies a term that has no advantages in it
    no_bound: float | None = None  # of a bound that may be None: from here on it bounds nothing, as None does
    # It acts only if this parameter has one of these values; without a value, if the parameter is set.
    only_with: tuple[Any, ...] = ()

    def check(self, key: str, value: Any, default: Any) -> None:
        """Raise ConfigError unless the kernel can take `value`."""
        if self.unchecked:
            _check_type(key, value, default)
            return
        if value is None and default is None:
            return
        if self.choices:
            if not any(
                value is choice or (value == choice and type(value) is str) for choice in self.choices
            ):
                raise unknown(key, str(value), map(str, self.choices), noun="value")
            return
        numbers = int if self.integer else int | float
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        # NaN compares as outside; the largest float keeps out infinities and integers beyond it.
        if not is_number or not max(self.low, -MAX) <= value <= min(self.high, MAX):
            wanted = "an integer" if self.integer else "a finite number"
            raise ConfigError(key, f"it is {value!r}", f"set {wanted} in {self.interval}")

    @property
    def low_open(self) -> bool:
        """Whether 0 itself is out of the range: `low` is then the least positive number."""
        return 0 < self.low < sys.float_info.min

    @property
    def interval(self) -> str:
        """The range as mathematics writes it: [0, 1], (0, inf)."""
        if self.unchecked:
            return "not checked"
        low = "(0" if self.low_open else "(-inf" if self.low == -math.inf else f"[{self.low:g}"
        return f"{low}, inf)" if self.high == math.inf else f"{low}, {self.high:g}]"


def _check_type(key: str, value: Any, default: Any) -> None:
    """Raise ConfigError for a number that is not finite, and for another type than the default's."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(key, f"it is {value!r}", "set a finite number")
    types: dict[Any, str] = {bool: "True or False", str: "a string", int | float: "a number"}
    wanted = next((one for one in types if isinstance(default, one)), None)
    if value is None or wanted is None:  # None may switch something off
        return
    if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
        raise ConfigError(key, f"it is {value!r}", f"set {types[wanted]}, as the default {default!r} is")


REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The parameters with which a loss reproduces one upstream: `cispo@trl` is the loss cispo as TRL has it.

    `upstream` is a framework, with a version where it changed: "trl", "verl<0.7.1".
    """

    upstream: str
    params: Mapping[str, Value] = field(default_factory=dict)
    source: str  # file and function of the upstream, with its version or commit
    proof: str  # "folder/test_file.py::test_name", or "no reference obtainable: the reason"
    note: str = ""  # what the upstream calls the parameters; what it does differently around the loss
    optional: tuple[str, ...] = ()  # the optional inputs of the loss that this upstream passes to it
    average: bool | None = None  # preference: whether its scores are averages, where not as the row's
    mode: str = ""  # policy: the upstream's own default aggregation mode, where not the paper's
    # aggregation: a denominator that the upstream takes from the batch: all rows, or the padded width
    denominators: Mapping[str, Literal["rows", "width"]] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        """The upstream without its version."""
        return re.split("[<>=!]", self.upstream)[0]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One catalogue row."""

    name: str
    kind: Kind
    summary: str
    paper: str
    # "folder/test_file.py::test_name", or "no reference obtainable: the reason"; a plugin may leave it out.
    proof: str = ""
    needs: tuple[str, ...]  # the inputs it is called with, in order (`inputs.INPUTS` describes each)
    tex: str = ""  # the formula in TeX, a display to a line, for the site
    path: str = ""  # "module:function"; "" is the function of this name in the kind's module of kernels
    optional: tuple[str, ...] = ()  # inputs it takes by keyword
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    dialects: tuple[Dialect, ...] = ()
    average: bool = False  # preference: scores are length-averaged log-probabilities
    mode: str = ""  # policy: the paper's aggregation mode
    advantage: str = ""  # policy: the advantage of its paper, where that does not divide by the deviation
    over_batch: bool = False  # a statistic of the whole batch, which changes when the batch is cut
    per_sequence: bool = False  # policy: one advantage per sequence; it averages those that differ by token
    over_sequence: bool = False  # policy: the loss of a token depends on the others of its sequence
    # Whether the gradient is the derivative of the value, or of a detached weight times log pi(y_t)
    # ("score"), or another one that is put in its place ("surrogate").
    gradient: Literal["derivative", "score", "surrogate"] = "derivative"
    detached: tuple[str, ...] = ()  # inputs of the policy which this loss uses without a gradient
    # Laws (`composer_plugins.testing.laws`) that the loss need not obey, and the reason: "law", or for one
    # setting "law(parameter=value)".
    exceptions: Mapping[str, str] = field(default_factory=dict)
    function: Callable[..., Any] | None = None  # the kernel itself, where no path leads to it

    def __post_init__(self) -> None:
        if self.path == "" and self.kind in KINDS and isinstance(self.name, str):
            path = f"composer_plugins.kernels.{KINDS[self.kind].module}:{self.name.replace('-', '_')}"
            object.__setattr__(self, "path", path)

    def kernel(self) -> Callable[..., Any]:
        """The function itself."""
        if self.function is not None:
            return self.function
        module, _, function = self.path.partition(":")
        kernel: Callable[..., Any] = getattr(import_module(module), function)
        return kernel

    def is_formula_of(self, other: "Loss") -> bool:
        """Whether the other loss is this one with other defaults, another denominator or another advantage.

        So are ppo, grpo, dapo and dr_grpo: one of them with the parameters of another is that other.
        """
        return self._formula() == other._formula()

    def _formula(self) -> tuple[Any, ...]:
        """The kernel under its defaults, the inputs, the parameters, and those that are fixed."""
        kernel, defaults = self.kernel(), dict[str, Any]()
        if isinstance(kernel, partial):  # a preset
            defaults, kernel = kernel.keywords, kernel.func
        fixed = {name: value for name, value in defaults.items() if name not in self.parameters}
        return kernel, self.kind, self.needs, {*self.parameters}, fixed

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of each parameter in the kernel's signature; REQUIRED where it has none."""
        signature = inspect.signature(self.kernel()).parameters
        found = {name: signature[name].default for name in self.parameters if name in signature}
        return {name: REQUIRED if d is inspect.Parameter.empty else d for name, d in found.items()}

    def check(
        self,
        params: Mapping[str, Any],
        key: str = "",
        others: Iterable["Loss"] = (),
        what_to_set: "Callable[[Loss, str], str]" = lambda loss, name: "",
    ) -> dict[str, Any]:
        """`params`, once each is known to be a parameter of this loss and in its range.

        `key` is the option that holds them ("policy_params"). `what_to_set` is the remedy for the name that
        a framework has for a parameter of a loss, "" for any other name. `others` are losses whose parameters
        an unknown name may mean.
        """
        prefix, wrong, noun = f"{key}." if key else "", Findings(), f"{self.name} parameter"
        for name, value in params.items():
            if name in self.parameters:
                with wrong.collected():
                    self.parameters[name].check(prefix + name, value, self.defaults.get(name, REQUIRED))
            elif remedy := what_to_set(self, name):
                wrong.append(Finding("error", prefix + name, f"unknown {noun} {name!r}", remedy))
            else:
                # A name that means a parameter of another loss is not a misspelling of one of this loss.
                guess = not any(what_to_set(one, name) for one in others)
                error = unknown(prefix + name, name, self.parameters, noun=noun, guess=guess, completes=False)
                wrong.append(Finding.from_error(error))
        enforce(wrong)
        return dict(params)

    def dialect(self, upstream: str) -> Dialect:
        """The dialect of that upstream, which is one of its own."""
        return next(one for one in self.dialects if one.upstream == upstream)


def check_kind(kind: object, key: str) -> None:
    """Raise ConfigError at `key` for an unknown kind."""
    if kind not in tuple(KINDS):  # of a plugin's row, it may be anything
        raise unknown(key, str(kind), KINDS, noun="kind")


def of_kind(losses: Iterable[Loss], kind: Kind) -> dict[str, Loss]:
    """The rows of one kind by name. Two kinds may share a name: grpo is a policy and an advantage."""
    return {loss.name: loss for loss in losses if loss.kind == kind}


def is_dotted(name: str) -> bool:
    """Whether a name is written like a function in a module, with dots only: package.module.function."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def unknown_loss(
    losses: Iterable[Loss], name: str, kind: str, *, option: str = "", also_accepted: Iterable[str] = ()
) -> ConfigError:
    """The error for a name that no loss of this kind has; it may be another kind's."""
    losses = tuple(losses)
    listed = f"composer-plugins list --kind {kind} shows all, and a function of yours is module:function"
    wanted = KINDS[kind].singular
    if others := [KINDS[loss.kind].singular for loss in losses if loss.name == name]:
        problem = f"{name!r} is {' and '.join(others)}, not {wanted}"
        return ConfigError(option or kind, problem, f"choose another ({listed})")
    names = [loss.name for loss in losses if loss.kind == kind]
    if is_dotted(name):
        module, _, function = name.rpartition(".")
        problem = f"{name!r} is not {wanted}, and an import path has a colon before the function"
        return ConfigError(option or kind, problem, f"write '{module}:{function}'")
    return unknown(option or kind, name, [*names, *also_accepted], noun=wanted.partition(" ")[2], more=listed)
