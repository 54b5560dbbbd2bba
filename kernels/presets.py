"""Published losses that differ from another loss in numbers alone: a name, a kernel, other defaults."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


def preset(
    kernel: Callable[Inputs, Result], name: str, doc: str, *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[Inputs, Result]:
    """`kernel` with other defaults, under the name and docstring of the loss that it then is.

    Its signature shows these defaults, and leaves out the parameters named in `without`, which this loss
    does not have.
    """
    made: Any = partial(kernel, **defaults)
    shown = inspect.signature(made)
    kept = [parameter for parameter in shown.parameters.values() if parameter.name not in without]
    made.__signature__ = shown.replace(parameters=kept)
    made.__name__ = made.__qualname__ = name
    made.__module__, made.__doc__ = kernel.__module__, doc
    return made  # type: ignore[no-any-return]
