"""Find an installed loss by the name that a user wrote, and say what is wrong where there is none.

A plugin that does not load takes its losses with it. The error for a name that is then unknown says so.
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, cast

from composer_plugins import catalogue, plugins
from composer_plugins.catalogue import Choice, Dialect, Kind, Loss, check_kind, is_dotted, unknown_loss
from composer_plugins.errors import ConfigError, near, spelling, unknown
from composer_plugins.plugins import Registry
from composer_plugins.rows import kind_of_import_path, row_of_import_path

# Published names that are not rows, and how to compute what they mean.
PARTS = {
    "wpo": "weigh the pairs of any preference loss with wpo_weights and weighted of "
    "composer_plugins.kernels.preference",
    "ld_dpo": "score completions with ld_logprobs of composer_plugins.kernels.preference, then use dpo",
    "bnpo": "use grpo@trl with the denominator token-mean@trl, counted in each micro-batch",
}

Found = tuple[Loss, Dialect | None]


def find(
    registry: Registry, name: str, kind: str | None = None, key: str = "NAME", kind_key: str = "--kind"
) -> list[Found]:
    """The losses of that name, one of each kind that has it; "cispo@trl" finds the dialect.

    The kind of a function named by import path ("my_package.losses:my_loss") follows from its first input.
    Raises ConfigError at `key`, which holds the name, if there is none, and at `kind_key` for another kind.
    """
    if kind is not None:
        check_kind(kind, kind_key)
    if ":" in name:
        kind = kind_of_import_path(name, key, registry.losses, cast(Kind | None, kind), kind_key)
        return [(row_of_import_path(name, kind, key, registry.losses), None)]
    base, at, upstream = name.partition("@")
    rows = [loss for loss in registry.losses if loss.name == base and kind in (None, loss.kind)]
    if not rows:
        raise with_plugin_problems(_unknown(registry, base, kind, key), base, registry)
    if not at:
        return [(loss, None) for loss in rows]
    having = [loss for loss in rows if any(d.upstream == upstream for d in loss.dialects)]
    if not having:
        raise _unknown_dialect(rows, upstream, key)
    return [(loss, loss.dialect(upstream)) for loss in having]


def find_one(name: str, kind: str | None = None, key: str = "loss") -> Choice:
    """The installed loss or dialect of that name; ConfigError if several kinds share the name.

    No parameter is checked, and a required one may be missing.
    """
    found = find(plugins.registry(), name, kind, key, "kind")
    if len(found) > 1:
        kinds = " or ".join(loss.kind for loss, _ in found)
        raise ConfigError(key, f"{name!r} is of several kinds", f"set kind (--kind) to {kinds}")
    ((loss, dialect),) = found
    if dialect is None:
        return Choice(loss, {}, key, optional=loss.optional if ":" in loss.name else ())
    return Choice(loss, dict(dialect.params), key, dialect.upstream, dialect.optional)


def choose(
    kind: Kind,
    name: str,
    params: Mapping[str, Any] | None = None,
    *,
    option: str = "",
    also_accepted: Iterable[str] = (),
) -> Choice:
    """The installed loss that an option of a config names: `catalogue.choose` among them."""
    registry = plugins.registry()
    try:
        return catalogue.choose(
            registry.losses, kind, name, params, option=option, also_accepted=also_accepted
        )
    except ConfigError as error:
        if ":" in name or name.partition("@")[0] in catalogue.of_kind(registry.losses, kind):
            raise
        raise with_plugin_problems(error, name.partition("@")[0], registry) from None


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


def mentions(loss: Loss, word: str) -> bool:
    """Whether the row has this word in its names, or in those of other frameworks, which its notes have."""
    texts = [loss.name, loss.summary, loss.paper, loss.path]
    for dialect in loss.dialects:
        texts += [f"{loss.name}@{dialect.upstream}", dialect.source, dialect.note]
    for name, parameter in loss.parameters.items():
        texts += [name, *parameter.also]
    return any(spelling(word) in spelling(text) for text in texts)


def _unknown(registry: Registry, name: str, kind: str | None, key: str) -> ConfigError:
    if where := PARTS.get(spelling(name)):
        return ConfigError(key, f"{name!r} is not a loss of its own", where)
    if kind is not None or is_dotted(name):
        return unknown_loss(registry.losses, name, kind or "policy", option=key)
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
