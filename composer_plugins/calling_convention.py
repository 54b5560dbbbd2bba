"""`Convention`: how a framework calls a loss function of a user's, and what it does with the result."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # a convention is declared without loading torch
    from torch import Tensor

Function = Callable[..., Any]


class Counts(NamedTuple):
    """What a framework knows of the whole batch when it calls a loss with a part of it."""

    tokens: int  # unmasked
    rows: int  # those without an unmasked token, too
    parts: int  # the micro-batches of one rank
    ranks: int
    width: int  # the longest response that the framework allows


class Called(NamedTuple):
    """One micro-batch: what the framework adds to its loss, and what is wrong with what it was given."""

    loss: "Tensor"  # divided as the framework divides it: the micro-batches of all ranks add up
    problems: tuple[str, ...] = ()  # "it returned a float, and not (loss, metrics)"
    misspelt: tuple[str, ...] = ()  # "it reads config.clip_ratio_hgih, which verl does not have"


# The function, the tensors by their names in `inputs.INPUTS`, the counts, the framework's options.
Call = Callable[[Function, "Mapping[str, Tensor]", Counts, Mapping[str, Any]], Called]


def _specialised_first(*_: Any) -> Called:
    raise NotImplementedError("specialise the convention for a function first")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """The calling convention of one framework's loss functions."""

    framework: str
    signature: str  # what a function of this convention looks like, for an error
    returns: str  # what it must return
    call: Call = _specialised_first
    needs: tuple[str, ...] = ("logprobs", "old_logprobs", "advantages", "mask")
    optional: tuple[str, ...] = ()
    must_use: tuple[str, ...] = ()  # the ones without which an option of the framework has no effect
    names: Mapping[str, str] = field(default_factory=dict)  # the framework's names of these inputs
    # Options of the framework that every function must follow, with their values; the first is the default.
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Parameters of the function itself, with their defaults, where its signature shows them.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    precision: Any = None  # the dtype that the framework computes in, if the tensors have another
    equal_parts: bool = False  # whether all micro-batches have the same number of rows
    find: Callable[[str], Function] | None = None  # a loss by its name, of a framework without a registry
    # The convention for one function, where it depends on the function's signature.
    specialise: "Callable[[Function], Convention] | None" = None
    # The convention of a version of the framework, or of the one that is read from the function or installed.
    of_version: "Callable[[Function, str | None], Convention] | None" = None
    release: str = ""  # that version
    # Whether the function gets a config. `call` then takes `own`, options of the author's own by their key.
    has_config: bool = False
    not_run: Mapping[str, str] = field(default_factory=dict)  # laws that mean nothing here, with the reason
    # The function as a kernel with one loss per token, where the convention has such a function.
    kernel: Callable[[Function], Function] | None = None
    # Outcomes of checks that only this convention has.
    more: Callable[[Function], tuple[Any, ...]] = lambda function: ()


def words_of(function: Function) -> set[str]:
    """The names that a function's module uses, and the modules that it imports something from.

    They are names of the code, and strings that are a name or a path of names: `config.get("a.b")`. A comment
    or a docstring uses none.
    """
    function = inspect.unwrap(getattr(function, "func", function))
    own = sys.modules.get(getattr(function, "__module__", ""))
    space = getattr(function, "__globals__", vars(own) if own else {})
    named = {getattr(value, "__module__", None) for value in space.values()}
    found = {space.get("__file__"), *(getattr(sys.modules.get(str(one)), "__file__", "") for one in named)}
    words = set[str]()
    for file in (one for one in found if one and one.endswith(".py")):
        with suppress(OSError, ValueError, SyntaxError), open(file, encoding="utf-8") as text:
            words |= {*_names_of(ast.parse(text.read()))}
    return words


def _names_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field_of_node in ("id", "attr", "arg", "name", "value"):
            found = getattr(node, field_of_node, None)
            if isinstance(found, str) and all(part.isidentifier() for part in found.split(".")):
                yield from found.split(".")


def checked_pair(
    result: Any, is_metric: Callable[[Any], bool], metric: str
) -> "tuple[Tensor, tuple[str, ...]]":
    """The loss of a (loss, metrics) pair, and what is wrong with the pair.

    Raises TypeError if the pair has no loss with which anything could be done.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"it returned {type(result).__name__}, and not (loss, metrics)")
    loss, metrics = result
    problems = scalar_problems(loss)
    if not isinstance(metrics, Mapping):
        return loss, (*problems, f"its metrics are {type(metrics).__name__}, and not a dict")
    wrong = [(name, value) for name, value in metrics.items() if not is_metric(value)]
    return loss, (*problems, *(f"the metric {n!r} is {_described(v)}, and not {metric}" for n, v in wrong))


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is None:
        return type(value).__name__
    return f"of the shape {list(shape)}{' with a gradient' if getattr(value, 'requires_grad', False) else ''}"


def scalar_problems(loss: Any) -> tuple[str, ...]:
    """What is wrong with a loss that must be one number; TypeError if it is something else."""
    import torch

    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"its loss is {type(loss).__name__}, and not a tensor")
    if loss.dim() != 0:
        raise TypeError(f"its loss has the shape {list(loss.shape)}, and not one number")
    if not loss.is_floating_point():
        raise TypeError(f"its loss is of {loss.dtype}, and not of a floating-point type")
    return () if loss.requires_grad else ("its loss has no gradient",)
