"""The one door to a loss: what a user named, with the parameters that were set, becomes a `Choice`.

A name is a loss ("cispo"), a dialect of one ("cispo@trl"), or the import path of a function of the user's
("my_package.losses:my_loss"). The commands take a function of a file, too ("my_losses.py:my_loss"). A plugin
that does not load takes its losses with it. The error for a name that is then unknown says so.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from composer_plugins.errors import ConfigError, Finding, enforce, log_info, near, spelling, unknown
from composer_plugins.losses import registry as installed
from composer_plugins.losses.registry import Registry
from composer_plugins.losses.row import (
    KINDS,
    REQUIRED,
    Dialect,
    Kind,
    Loss,
    check_kind,
    is_dotted,
    of_kind,
    unknown_loss,
)

# Published names that are not rows, and how to compute what they mean.
PARTS = {
    "wpo": "weigh the pairs of any preference loss with wpo_weights and weighted of "
    "composer_plugins.kernels.preference",
    "ld_dpo": "score completions with ld_logprobs of composer_plugins.kernels.preference, then use dpo",
    "sigmoid": "it is TRL's loss_type of DPO: set 'dpo'",
    "alphapo": "it is TRL's loss_type of AlphaPO: set 'alpha_po'",
    "bnpo": "use grpo@trl with the denominator token-mean@trl, counted in each micro-batch",
}


@dataclass(frozen=True)
class Choice:
    """A loss as a user named it: the row, the parameters it is called with, and the option that names it.

    The row of "cispo" is in `losses/bundled/policy.py`, its function `cispo` in `kernels/policy/`.
    """

    loss: Loss
    params: Mapping[str, Any]
    option: str = ""  # "policy", "hint_divergence" ...: the key of errors about this choice
    upstream: str = ""  # of a dialect: "trl"
    optional: tuple[str, ...] = ()  # the optional inputs that are passed to it

    @property
    def name(self) -> str:
        """The name with its dialect: "cispo@trl"."""
        return f"{self.loss.name}@{self.upstream}" if self.upstream else self.loss.name

    @property
    def described(self) -> str:
        """The name and the values that act, for a log: "dapo(clip_low=0.2, clip_high=0.28)"."""
        values = {name: self.value(name) for name in self.loss.parameters}
        shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.name}({shown})"

    @property
    def is_import_path(self) -> bool:
        """Whether the loss is a function that the user named by import path."""
        return ":" in self.loss.name

    @property
    def is_third_party(self) -> bool:
        """Whether the kernel is not one of this package, whose tests have not seen it."""
        return not self.loss.path.startswith("composer_plugins.kernels.")

    @property
    def params_option(self) -> str:
        """The option that holds the parameters: "hint_params" for "hint_divergence"."""
        return f"{self.option.removesuffix('_divergence').removesuffix('_loss')}_params"

    @property
    def dialect(self) -> Dialect | None:
        """The row of the dialect, if one was named."""
        return self.loss.dialect(self.upstream) if self.upstream else None

    @property
    def average(self) -> bool:
        """Preference: whether scores are averages over tokens, and not sums."""
        dialect = self.dialect
        return self.loss.average if dialect is None or dialect.average is None else dialect.average

    @property
    def mode(self) -> str:
        """Policy: the aggregation mode of the paper, or of the upstream whose dialect was named."""
        dialect = self.dialect
        return dialect.mode if dialect is not None and dialect.mode else self.loss.mode

    def value(self, parameter: str) -> Any:
        """The value of a parameter: as set, or the kernel's default; None if the loss lacks it."""
        return self.params[parameter] if parameter in self.params else self.loss.defaults.get(parameter)

    def with_optional(self, *names: str) -> "Choice":
        """This choice, called with these optional inputs too, as far as its loss has them."""
        added = [name for name in names if name in self.loss.optional and name not in self.optional]
        return replace(self, optional=(*self.optional, *added))


def choose(
    kind: Kind,
    name: str,
    params: Mapping[str, Any] | None = None,
    *,
    option: str = "",
    also_accepted: Iterable[str] = (),
    what_to_set: Callable[[Loss, str], str] = lambda loss, name: "",
) -> Choice:
    """Return the installed loss of this kind that `name` names, with `params` over its dialect's.

    `option` is the option that holds the name, and `also_accepted` what else that option accepts, for the
    error. `what_to_set` is the remedy for a parameter by the name that a framework has for it (`Loss.check`).
    Raises ConfigError for an unknown name, dialect or parameter, for a value out of its range, and for a
    required parameter that is missing.
    """
    known = installed.registry()
    chosen = _chosen(kind, name, option or kind, known, also_accepted)
    loss, dialect, key = chosen.loss, chosen.dialect, chosen.params_option
    others = of_kind(known.losses, kind).values()
    merged = loss.check({**chosen.params, **(params or {})}, key, others, what_to_set)
    given = {*merged, *(dialect.denominators if dialect else {})}
    for parameter, default in loss.defaults.items():
        if default is REQUIRED and parameter not in given:
            meaning = "" if chosen.is_import_path else f": {loss.parameters[parameter].help}"
            raise ConfigError(f"{key}.{parameter}", f"{loss.name!r} has no default for it{meaning}", "set it")
    chosen = replace(chosen, params=merged)
    enforce(_without_effect(chosen, params or {}))
    return chosen


def _chosen(kind: Kind, name: str, option: str, known: Registry, also_accepted: Iterable[str]) -> Choice:
    """Return the loss or the dialect of this name, with the parameters of the dialect."""
    if ":" in name:
        from composer_plugins.losses.derived import function_of_import_path, row_of_signature

        by_path = {row.path: row for row in known.losses if row.kind == kind}
        if (loss := by_path.get(name)) is None:
            function = function_of_import_path(name, option)
            loss = row_of_signature(function, name, kind, option, known.losses)
        return of_row(loss, option, None)
    (chosen,) = find(known, name, kind, option, also_accepted=also_accepted)
    return chosen


def of_row(loss: Loss, option: str = "", dialect: Dialect | None = None) -> Choice:
    """Return a row, or a dialect of it, as chosen by this option; no parameter is checked."""
    if dialect is None:
        return Choice(loss, {}, option, optional=loss.optional if ":" in loss.name else ())
    return Choice(loss, dict(dialect.params), option, dialect.upstream, dialect.optional)


def _without_effect(choice: Choice, given: Iterable[str]) -> Iterator[Finding]:
    """Yield an error for each given parameter that acts only with another one, where it does not act."""
    for name in given:
        other, *values = choice.loss.parameters[name].only_with or (name,)
        value = choice.value(other)
        if other == name or choice.value(name) == choice.loss.defaults.get(name):
            continue
        if value is None or (values and value not in values):
            problem = f"it has no effect, because {other} is {'not set' if value is None else repr(value)}"
            remedy = f"set {other}{f' to {values[0]!r}' if values else ''}, or remove it"
            yield Finding("error", f"{choice.params_option}.{name}", problem, remedy)


def find(
    registry: Registry,
    name: str,
    kind: str | None = None,
    key: str = "NAME",
    kind_key: str = "--kind",
    also_accepted: Iterable[str] = (),
) -> list[Choice]:
    """The losses of that name, one of each kind that has it; "cispo@trl" finds the dialect.

    No parameter is checked, and a required one may be missing.

    The kind of a function ("my_package.losses:my_loss", "my_losses.py:my_loss") follows from its first input.
    Raises ConfigError at `key`, which holds the name, if no loss has it, and at `kind_key` for an unknown
    kind.
    `also_accepted` is what else `key` accepts.
    """
    if kind is not None:
        check_kind(kind, kind_key)
    if ":" in name:
        from composer_plugins.losses.derived import function_named, row_of_function

        function, known = function_named(name, key), cast(Kind | None, kind)
        return [of_row(row_of_function(function, known, key, registry.losses, name), key)]
    base, at, upstream = name.partition("@")
    rows = [loss for loss in registry.losses if loss.name == base and kind in (None, loss.kind)]
    if not rows:
        raise with_plugin_problems(_unknown(registry, base, kind, key, also_accepted), base, registry)
    if not at:
        return [of_row(loss, key) for loss in rows]
    having = [loss for loss in rows if any(d.upstream == upstream for d in loss.dialects)]
    if not having:
        raise _unknown_dialect(rows, upstream, key)
    return [of_row(loss, key, loss.dialect(upstream)) for loss in having]


def find_one(name: str, kind: str | None = None) -> Choice:
    """The installed loss or dialect that `find` finds; of several kinds, the policy loss."""
    found = {one.loss.kind: one for one in find(installed.registry(), name, kind, "loss", "kind")}
    return found[kind_meant(found, name)]


def kind_meant(kinds: Iterable[Kind], named: str) -> Kind:
    """The kind that is meant where several have a name: the first of `KINDS`, as policy. It is logged."""
    first, *others = sorted(kinds, key=[*KINDS].index)
    if others:
        other = f"set kind (--kind) to {' or '.join(others)} for the other"
        log_info(f"{named}: taken as {KINDS[first].singular}; {other}")
    return first


def row_named(name: str, kind: str | None = None) -> Loss:
    """The row of the loss that `find_one` finds; of a dialect, the row with this dialect alone."""
    found = find_one(name, kind)
    if (dialect := found.dialect) is None:
        return found.loss
    others = {f"@{one.upstream}" for one in found.loss.dialects if one is not dialect}
    kept = {key: why for key, why in found.loss.exceptions.items() if not key.endswith(tuple(others))}
    return replace(found.loss, dialects=(dialect,), exceptions=kept)


def with_plugin_problems(error: ConfigError, name: str, registry: Registry) -> ConfigError:
    """The error for an unknown name, with what is wrong with the plugins that may have brought it."""
    own = [problem for problem in registry.problems if problem.loss == name]
    if own and not any(loss.name == name for loss in registry.losses):
        problem = f"{name!r} cannot be used. {'. '.join(map(str, own))}"
        return ConfigError(error.key, problem, f"correct or update {own[0].distribution}")
    unnamed = [problem for problem in registry.problems if problem.loss is None]
    if not unnamed:
        return error
    which = " and ".join(map(str, unnamed))
    return ConfigError(error.key, error.problem, f"{error.remedy} (not everything is loaded: {which})")


def mentions(loss: Loss, word: str, more: Iterable[str] = ()) -> bool:
    """Whether the row has this word in its names or in its notes, or whether one of `more` has it."""
    texts = [loss.name, loss.summary, loss.paper, loss.path, *loss.parameters, *more]
    for dialect in loss.dialects:
        texts += [f"{loss.name}@{dialect.upstream}", dialect.source, dialect.note]
    return any(spelling(word) in spelling(text) for text in texts)


def _unknown(
    registry: Registry, name: str, kind: str | None, key: str, also_accepted: Iterable[str]
) -> ConfigError:
    if where := PARTS.get(spelling(name)):
        return ConfigError(key, f"{name!r} is not a loss of its own", where)
    file = f"{name.removesuffix('.py')}.py"
    if Path(file).is_file():
        problem = f"unknown loss {name!r}, and {file} is a file here"
        remedy = (
            f"name a function of it: {file}:FUNCTION in a command, and {Path(file).stem}:FUNCTION in a config"
        )
        return ConfigError(key, problem, remedy)
    of_kind = [loss for loss in registry.losses if kind in (None, loss.kind)]
    example = next((loss.name for loss in of_kind for d in loss.dialects if d.upstream == name), "")
    if example and name not in {loss.name for loss in registry.losses}:
        remedy = f"a dialect is written with its loss, {example}@{name} (composer-plugins list --dialects-of "
        return ConfigError(key, f"{name!r} is an upstream, not a loss", f"{remedy}{name} shows all)")
    if kind is not None or is_dotted(name):
        return unknown_loss(registry.losses, name, kind or "policy", option=key, also_accepted=also_accepted)
    names = [loss.name for loss in registry.losses]
    begin_so = [one for one in names if spelling(one).startswith(spelling(name))]
    if name.strip() and not begin_so and any(mentions(loss, name) for loss in registry.losses):
        remedy = f"composer-plugins list {shlex.quote(name)} shows the losses whose notes have this word"
        return ConfigError(key, f"unknown loss {name!r}", remedy)
    return unknown(key, name, names, noun="loss", more="composer-plugins list shows all")


def _unknown_dialect(rows: list[Loss], upstream: str, key: str) -> ConfigError:
    """The error for an unknown dialect; two kinds may share the name, each with dialects of its own."""
    name = rows[0].name
    known = [d.upstream for loss in rows for d in loss.dialects]
    if len(rows) == 1 or near(upstream, known):
        more = f"{name!r} alone is the paper's"
        return unknown(key, upstream, known, noun="dialect", stem=f"{name}@", more=more)
    lists = [f"{loss.kind} {', '.join(f'{name}@{d.upstream}' for d in loss.dialects)}" for loss in rows]
    return ConfigError(key, f"unknown dialect '{name}@{upstream}'", f"known: {', or '.join(lists)}")
