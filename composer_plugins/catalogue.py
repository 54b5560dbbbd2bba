"""The losses by name: which kernel, from which paper, with which parameters, fed with what.

A row is data and loads nothing: `Loss.kernel()` imports torch. The bundled rows come in through the
same pluggy hook as a third party's would (`hookspecs.py`).
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

from composer_plugins.errors import ConfigError, unknown

MAX = sys.float_info.max

Kind = Literal["policy", "advantage", "divergence", "preference", "kl", "correction", "aggregation"]
Value = float | int | str | bool | None

NOUNS: dict[str, str] = {  # by kind, what one loss of it is called
    "policy": "a policy loss",
    "advantage": "an advantage",
    "divergence": "a divergence",
    "preference": "a preference loss",
    "kl": "a KL estimator",
    "correction": "a rollout correction",
    "aggregation": "an aggregation mode",
}


@dataclass(frozen=True)
class Parameter:
    """A keyword of a kernel: a number in a range (None only where it is the default), or a choice.

    `default=REQUIRED` has none: whoever names the loss must give it.
    """

    default: Any
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str | bool, ...] = ()
    integer: bool = False
    example: Any = None  # a value for `explain`, where there is no default

    def check(self, where: str, value: Any) -> None:
        """Raise ConfigError unless the kernel can take `value`."""
        if value is None and self.default is None:
            return
        if self.choices:
            if not any(
                value is choice or (value == choice and type(value) is str) for choice in self.choices
            ):
                raise unknown(where, str(value), map(str, self.choices))
            return
        numbers = int if self.integer else int | float
        is_number = isinstance(value, numbers) and not isinstance(value, bool)
        # NaN compares as outside; the largest float keeps out infinities and integers beyond it.
        if not is_number or not max(self.low, -MAX) <= value <= min(self.high, MAX):
            noun = "integer" if self.integer else "finite number"
            article = "an" if self.integer else "a"
            raise ConfigError(f"{where} is {value!r}; wanted {article} {noun} in {self.interval}")

    @property
    def low_open(self) -> bool:
        """Whether 0 itself is out of the range: `low` is then the least positive number."""
        return 0 < self.low < sys.float_info.min

    @property
    def interval(self) -> str:
        """The range as mathematics writes it: [0, 1], (0, inf)."""
        low = "(0" if self.low_open else "(-inf" if self.low == -math.inf else f"[{self.low:g}"
        return f"{low}, inf)" if self.high == math.inf else f"{low}, {self.high:g}]"


REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The parameters with which a loss reproduces one upstream: `cispo@trl` is the loss cispo as TRL has it.

    `upstream` is a framework, with a version where it changed its mind: "trl", "verl<0.7.1".
    """

    upstream: str
    params: Mapping[str, Value] = field(default_factory=dict)
    source: str  # file and function of the upstream, with its version or commit
    proof: str  # "test_file.py::test_name", or "no reference obtainable: the reason"
    note: str = ""  # what the upstream calls the parameters; what it does differently around the loss
    takes: tuple[str, ...] = ()  # of the loss's optional inputs those that this upstream feeds it with
    average: bool | None = None  # preference: whether its scores are averages, where not as the row's
    # aggregation: a denominator that the upstream takes from the batch: all rows, or the padded width
    counts: Mapping[str, Literal["rows", "width"]] = field(default_factory=dict)

    @property
    def framework(self) -> str:
        """The upstream without its version."""
        return re.split("[<>=!]", self.upstream)[0]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One catalogue row."""

    name: str
    kind: Kind
    path: str  # "module:function"
    summary: str
    paper: str
    proof: str  # "test_file.py::test_name", or "no reference obtainable: the reason"
    needs: tuple[str, ...]  # the inputs it is called with, in order (`inputs.INPUTS` describes each)
    optional: tuple[str, ...] = ()  # inputs it takes by keyword
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    dialects: tuple[Dialect, ...] = ()
    average: bool = False  # preference: scores are length-averaged log-probabilities
    mode: str = ""  # policy: the paper's aggregation mode
    over_batch: bool = False  # a statistic of the whole batch, which changes when the batch is cut

    def kernel(self) -> Callable[..., Any]:
        """The function itself."""
        module, _, function = self.path.partition(":")
        kernel: Callable[..., Any] = getattr(import_module(module), function)
        return kernel

    def check(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """`params` as given, once each is known to be a parameter of this loss and in its range."""
        for name, value in params.items():
            if name not in self.parameters:
                raise unknown(f"parameter of {self.name!r}", name, self.parameters)
            self.parameters[name].check(f"{self.name}'s parameter {name!r}", value)
        return dict(params)

    def dialect(self, upstream: str) -> Dialect:
        """The dialect of that upstream, or a ConfigError that lists those there are."""
        for dialect in self.dialects:
            if dialect.upstream == upstream:
                return dialect
        known, alone = [d.upstream for d in self.dialects], f"{self.name!r} alone is the paper's"
        raise unknown("dialect", upstream, known, stem=f"{self.name}@", more=alone)


def check_kind(kind: str) -> None:
    """Raise ConfigError for a kind there is not."""
    if kind not in get_args(Kind):
        raise unknown("kind", kind, get_args(Kind))


def of_kind(losses: Iterable[Loss], kind: Kind) -> dict[str, Loss]:
    """The rows of one kind by name; of two kinds, two may share one (grpo is a policy and an advantage)."""
    return {loss.name: loss for loss in losses if loss.kind == kind}


class Choice(NamedTuple):
    """A loss as a user named it: the row, and the parameters it will be called with."""

    loss: Loss
    params: dict[str, Any]
    average: bool
    takes: tuple[str, ...] = ()  # optional inputs that the dialect is fed with


def choose(
    losses: Iterable[Loss],
    kind: Kind,
    name: str,
    params: Mapping[str, Any] | None = None,
    *,
    what: str | None = None,
    beside: Iterable[str] = (),
) -> Choice:
    """The loss called `name` ("cispo") or a dialect of it ("cispo@trl"), with `params` over the dialect's.

    `what` is the option that holds the name and `beside` what else that option takes: for the error.
    Raises ConfigError for an unknown name, dialect or parameter, a value out of its range, and a
    required parameter that is missing.
    """
    losses = tuple(losses)
    rows = of_kind(losses, kind)
    base, at, upstream = name.partition("@")
    if base not in rows:
        raise unknown_loss(losses, base, kind, what=what, beside=beside)
    loss = rows[base]
    dialect = loss.dialect(upstream) if at else None
    merged = loss.check({**(dialect.params if dialect else {}), **(params or {})})
    given = {*merged, *(dialect.counts if dialect else {})}
    missing = [n for n, p in loss.parameters.items() if p.default is REQUIRED and n not in given]
    if missing:
        raise ConfigError(
            f"{base} has no default for {', '.join(missing)} (no published value could be checked): set "
            + ", ".join(f"{n} ({loss.parameters[n].help})" for n in missing)
        )
    average = loss.average if dialect is None or dialect.average is None else dialect.average
    return Choice(loss, merged, average, dialect.takes if dialect else ())


def unknown_loss(
    losses: Iterable[Loss], name: str, kind: str, *, what: str | None = None, beside: Iterable[str] = ()
) -> ConfigError:
    """The error for a name that no loss of this kind has: it may be another kind's."""
    losses = tuple(losses)
    if others := [NOUNS[loss.kind] for loss in losses if loss.name == name]:
        named = f"{what} {name!r}" if what else repr(name)
        return ConfigError(f"{named} is {' and '.join(others)}, not {NOUNS[kind]}")
    names = [loss.name for loss in losses if loss.kind == kind]
    return unknown(
        what or kind, name, [*names, *beside], more=f"composer-plugins list --kind {kind} shows all"
    )
