"""The losses by name: which kernel, from which paper, with which parameters, fed with what.

A row is data and loads nothing: `Loss.kernel()` imports torch. The bundled rows come in through the
same pluggy hook as a third party's would (`hookspecs.py`).
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from composer_plugins.errors import ConfigError, unknown

MAX = sys.float_info.max

Kind = Literal["policy", "divergence", "preference"]


@dataclass(frozen=True)
class Parameter:
    """A keyword of a kernel: a number in a range (None only where it is the default), or a choice."""

    default: float | str | None
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()

    def check(self, where: str, value: Any) -> None:
        """Raise ConfigError unless the kernel can take `value`."""
        if value is None and self.default is None:
            return
        if self.choices:
            if value not in self.choices:
                raise unknown(where, str(value), self.choices)
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # NaN compares as outside; the largest float keeps out infinities and integers beyond it.
        if not is_number or not max(self.low, -MAX) <= value <= min(self.high, MAX):
            raise ConfigError(
                f"{where} is {value!r}; wanted a finite number in [{self.low:g}, {self.high:g}]"
            )


@dataclass(frozen=True)
class Loss:
    """One catalogue row."""

    name: str
    kind: Kind
    path: str  # "module:function", relative to composer_plugins.kernels for the bundled ones
    summary: str
    paper: str
    needs: tuple[str, ...]  # the tensors it is called with, in order, before the mask
    parameters: Mapping[str, Parameter]
    average: bool = False  # preference: scores are length-averaged log-probabilities

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


Catalogue = Mapping[str, Loss]


def of_kind(losses: Catalogue, kind: Kind) -> dict[str, Loss]:
    """The rows of one kind."""
    return {name: loss for name, loss in losses.items() if loss.kind == kind}
