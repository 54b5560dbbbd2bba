"""`check_as`: the laws on a loss function that is written in a framework's own calling convention.

A framework's convention is in its adapter (`Convention`), or in this package if it has no adapter.
Most conventions reduce inside the function: then it is a `OneNumber`. A law of policy losses that is not run
on one is reported as not applicable, with the reason.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, cast

from torch import Tensor

from composer_plugins.calling_convention import Convention, Function
from composer_plugins.errors import ConfigError, unknown, with_place
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.frameworks.registry import conventions, frameworks
from composer_plugins.losses.derived import first_parameter, function_named, row_of_function
from composer_plugins.losses.registry import losses
from composer_plugins.testing.checking import (
    check_row,
    exceptions_without_a_law,
    first_of,
    require_known,
    run_laws,
    untold,
    with_options,
)
from composer_plugins.testing.conventions.function import OneNumber, row_of
from composer_plugins.testing.laws import FUNCTION, LAWS, NOT_RUN, laws_for
from composer_plugins.testing.laws.results import SPREADS, every_parameter_has_an_effect
from composer_plugins.testing.laws.tokens import packed_tokens_equal_a_padded_row
from composer_plugins.testing.report import Outcome, Report
from composer_plugins.testing.settings import settings, value_and_gradients

PACKED = packed_tokens_equal_a_padded_row.__name__
OPTION_LAW = every_parameter_has_an_effect.__name__


def find_convention(framework: str) -> Convention:
    """The convention of a framework; ConfigError with those there are."""
    known = conventions()
    if framework not in known:
        raise unknown("--as", framework, known, noun="convention")
    module, _, name = known[framework].partition(":")
    try:
        found: Convention = getattr(import_module(module), name)
    except ImportError as error:
        problem = f"{framework} cannot be imported here: {error}"
        raise ConfigError("--as", problem, f"run this where {framework} is installed") from None
    return found


def find_function(named: "str | Callable[..., Any]", convention: Convention) -> Callable[..., Any]:
    """The function itself, by import path or by its name in the framework's registry."""
    if not isinstance(named, str):
        return named
    if ":" in named:
        return function_named(named, "check")
    if convention.find is not None:
        return convention.find(named)
    framework = frameworks().get(convention.framework)
    if framework is None or not framework.registry:
        problem = f"{named!r} is not an import path, and {convention.framework} has no registry of losses"
        raise ConfigError("check", problem, "write module:function or FILE.py:function")
    return in_registry(named, framework)


def in_registry(name: str, framework: Framework) -> Function:
    """The policy loss of this name in a framework's registry."""
    title = framework.title
    if find_spec(framework.package) is None:
        problem = f"{name!r} is looked up in {title}'s registry, and {title} is not installed"
        remedy = f"install {title} here, or name a function by its import path: module:function"
        raise ConfigError("check", problem, remedy)
    module, _, policy_losses = framework.registry.partition(":")
    known: Mapping[str, Function] = getattr(import_module(module), policy_losses)()
    if name not in known:
        raise unknown("check", name, known, noun=f"policy loss of {title}'s registry")
    return known[name]


def check_as(
    named: "str | Callable[..., Any]",
    framework: str,
    only: Iterable[str] = (),
    *,
    version: str | None = None,
    options: Mapping[str, Any] = NOTHING,
    tell: Callable[[str], None] = untold,
) -> Report:
    """Run the laws on a function of a framework's convention, or `only` the laws with these names.

    `named` is an import path, a function, or a name in the framework's registry ("vanilla" of verl).
    `version` is the framework's, and `options` are parameters of the function's own, or options that it
    reads in the framework's config. Raises ConfigError for a function or a convention that cannot be found.
    """
    convention = find_convention(framework)
    function = find_function(named, convention)
    if first_parameter(function) == "logprobs" and convention.framework not in ("torch", "trl"):
        problem = f"its first parameter is logprobs, like a kernel's here, and {convention.framework} calls "
        raise ConfigError("--as", problem + convention.signature, "leave out --as, or adapt the function")
    name = named if isinstance(named, str) else getattr(function, "__qualname__", repr(function))
    if convention.of_version is not None:
        convention = convention.of_version(function, version)
    elif version is not None:
        problem = f"the check knows one version of {convention.framework} alone"
        raise ConfigError("--version", problem, "remove it: it is for --as verl and --as prime-rl")
    bare = function, convention
    function, convention = with_options(function, convention, options)
    if convention.specialise is not None:
        convention = convention.specialise(function)
    subject = f"{name} (as {f'{convention.framework} {convention.release}'.strip()} calls it)"
    if convention.kernel is not None:
        return _kernel_report(function, convention, name, subject, tuple(only), tell)
    convention, refused = accepted(function, convention, name)
    row, only = row_of(function, convention, name), tuple(only)
    not_run = {**NOT_RUN, **convention.not_run}
    laws = laws_for(FUNCTION, convention.framework)
    require_known(only, laws_for(FUNCTION) | LAWS)
    for one in only:
        if one not in laws and one not in not_run:
            others = laws_for(FUNCTION).get(one)
            kinds = f"losses of the kind {' or '.join(LAWS[one].kinds)}" if one in LAWS else ""
            where = f"--as {' and '.join(others.frameworks)} alone" if others else kinds
            remedy = "remove it: check --laws says which laws are run"
            raise ConfigError("only", f"the law {one} is for {where}", remedy)
    run = [law for law in laws.values() if law.name not in not_run]
    chosen = [law for law in run if not only or law.name in only]
    found = run_laws(chosen, row, OneNumber, tell, first_of(run))
    if refused and chosen and chosen[0].first and found[0].status == "passed":
        cause = "the function raises an error with what it does not know; the other laws are run without that"
        found[0] = Outcome(chosen[0].name, "unsafe", "\n".join(refused), cause)
    if OPTION_LAW in [one.name for one in chosen] and (inert := "\n".join(_inert(*bare, options, name))):
        found = [one for one in found if one.check != OPTION_LAW]
        found.append(Outcome(OPTION_LAW, "failed", inert, "usual cause: it is logged, or under no_grad"))
    outcomes = (
        *exceptions_without_a_law(row, laws, f"--as {convention.framework}"),
        *found,
        *(Outcome(one, "not applicable", not_run[one]) for one in not_run if not only or one in only),
    )
    return Report(subject, outcomes)


def accepted(function: Function, convention: Convention, name: str) -> tuple[Convention, list[str]]:
    """The convention with what the function accepts: inputs that it needs, and options; and what it refuses.

    A function that accepts nothing keeps the convention: the first law reports its error.
    """

    def error(needs: tuple[str, ...], way: Mapping[str, str]) -> str:
        optional = tuple(one for one in convention.optional if one not in needs)
        options = {key: (value,) for key, value in way.items()}
        own = replace(convention, needs=needs, optional=optional, options=options)
        setting = cast(OneNumber, next(settings(row_of(function, own, name), thorough=False, of=OneNumber)))
        try:
            setting.problems(setting.draw())
        except Exception as problem:
            return with_place(problem)
        return ""

    needed = [convention.needs, *((*convention.needs, one) for one in convention.optional)]
    keys = convention.options
    ways = [dict(zip(keys, values, strict=True)) for values in product(*keys.values())]
    works = next(((needs, way) for needs in needed for way in ways if not error(needs, way)), None)
    if works is None:
        return convention, []
    needs, way = works
    added = [one for one in needs if one not in convention.needs]
    said = [f"{name} without {one}: {error(convention.needs, way)}" for one in added]
    options = dict[str, tuple[str, ...]]()
    for key, values in keys.items():
        others = {one: error(needs, {**way, key: one}) for one in values}
        said += [f"{name}({key}={one!r}): {problem}" for one, problem in others.items() if problem]
        options[key] = tuple(one for one, problem in others.items() if not problem)
    optional = tuple(one for one in convention.optional if one not in needs)
    return replace(convention, needs=needs, optional=optional, options=options), said


def _inert(
    function: Function, convention: Convention, options: Mapping[str, Any], name: str
) -> Iterator[str]:
    """Yield a sentence for each number among the options whose half and double give the same gradient."""

    def gradients(key: str, value: Any) -> Iterator[Tensor]:
        own, called = with_options(function, convention, {**options, key: value})
        called = accepted(own, called, name)[0]
        *_, setting = settings(row_of(own, called, name), thorough=False, of=OneNumber)  # with all inputs
        for seed, spread in product(range(4), SPREADS):
            yield from value_and_gradients(setting, setting.draw(seed, spread=spread))[1].values()

    for key, value in options.items():
        if isinstance(value, float) and value and convention.specialise is None:
            others = (value / 2, 2 * value)
            with suppress(Exception):  # a function may accept the given value alone
                pairs = [zip(gradients(key, value), gradients(key, one), strict=True) for one in others]
                if all(one.equal(other) for pair in pairs for one, other in pair):
                    yield f"{key!r}: {[value, *others]} all give the same gradient"


def _kernel_report(
    function: Function,
    convention: Convention,
    name: str,
    subject: str,
    only: tuple[str, ...],
    tell: Callable[[str], None],
) -> Report:
    """The laws of kernels, on a function that returns one loss per token."""
    assert convention.kernel is not None
    row = row_of_function(convention.kernel(function), "policy", "check", losses())
    more = [outcome for outcome in convention.more(function) if not only or outcome.check in only]
    own = [outcome.check for outcome in more]
    left = [one for one in only or laws_for(row.kind) if one not in (*own, PACKED)]
    found = check_row(replace(row, name=name), left, tell).outcomes if left else ()
    reason = NOT_RUN[PACKED]
    more += [Outcome(PACKED, "not applicable", reason)] if not only or PACKED in only else []
    return Report(subject, (*found, *more))
