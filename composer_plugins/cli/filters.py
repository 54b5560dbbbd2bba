"""Which losses `composer-plugins list` shows: a search and filters, and why they leave none."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from composer_plugins.errors import ConfigError, did_you_mean, near, spelling
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import other_names, running
from composer_plugins.losses.choosing import PARTS, mentions
from composer_plugins.losses.registry import Registry
from composer_plugins.losses.row import KINDS, Dialect, Loss

Shown = tuple[Loss, list[Dialect]]  # a row, and those of its dialects that were asked for

ARXIV = "https://arxiv.org/abs/"


class Filter(NamedTuple):
    """A search word or an option as the user wrote it, and what it keeps of a row: None for nothing."""

    text: str
    keep: Callable[[Shown], Shown | None]


def filters(
    registry: Registry,
    words: Iterable[str] = (),
    kinds: Sequence[str] = (),
    needs: Iterable[str] = (),
    frameworks: Iterable[str] = (),
    dialects_of: Sequence[str] = (),
) -> list[Filter]:
    """The filters that were asked for; ConfigError for a value that one does not accept.

    One of the kinds and of the upstreams of dialects suffices; every input and every framework is required.
    """
    return [
        *map(_search, words),
        *([_of_kinds(kinds)] if kinds else []),
        *(_with_input(registry, need) for need in needs),
        *(_run_by(registry, framework) for framework in frameworks),
        *([_dialects_of(registry, dialects_of)] if dialects_of else []),
    ]


def select(registry: Registry, chosen: Iterable[Filter]) -> list[Shown]:
    """The rows that all of these filters keep."""
    rows: list[Shown] = [(loss, list(loss.dialects)) for loss in registry.losses]
    for one in chosen:
        rows = [kept for row in rows if (kept := one.keep(row)) is not None]
    return rows


def why_none(registry: Registry, chosen: list[Filter]) -> Iterator[str]:
    """Yield a line for each filter: how many losses it keeps alone, and how many the others would keep."""
    yield "no loss matches"
    for one in chosen:
        alone = len(select(registry, [one]))
        others = [other for other in chosen if other is not one]
        without = f"; without it {_losses(len(select(registry, others)))} would match" if others else ""
        hint = "" if alone or one.text.startswith("--") else _hint(registry, one.text.strip("'"))
        yield f"  {one.text} alone matches {_losses(alone)}{without}{hint}"


def _losses(n: int) -> str:
    return f"{n or 'no'} loss{'es' * (n > 1)}"


def _hint(registry: Registry, word: str) -> str:
    if part := PARTS.get(spelling(word)):
        return f"; it is not a loss of its own: {part}"
    nearest = near(word, [loss.name for loss in registry.losses])
    return f"; {did_you_mean(nearest)}" if nearest else ""


def _search(word: str) -> Filter:
    if not word.strip():
        raise ConfigError("SEARCH", "an empty word is given", "give a word, or none to list all")
    return Filter(
        repr(word),
        lambda row: row if mentions(row[0], word.removeprefix(ARXIV), other_names(row[0])) else None,
    )


def _of_kinds(kinds: Sequence[str]) -> Filter:
    for kind in kinds:
        if kind not in KINDS:
            raise _not_accepted("--kind", kind, KINDS, "kind")
    return Filter(_options("--kind", kinds), lambda row: row if row[0].kind in kinds else None)


def _options(option: str, values: Sequence[str]) -> str:
    return " ".join(f"{option} {value}" for value in values)


def inputs(registry: Registry) -> list[str]:
    """Every input that a loss has."""
    return sorted({name for loss in registry.losses for name in (*loss.needs, *loss.optional)})


def _with_input(registry: Registry, need: str) -> Filter:
    if need not in inputs(registry):
        raise _not_accepted("--needs", need, inputs(registry), "input")
    return Filter(f"--needs {need}", lambda row: row if need in (*row[0].needs, *row[0].optional) else None)


def upstreams(registry: Registry) -> set[str]:
    """Every upstream that a dialect names, with its version and without."""
    named = [dialect for loss in registry.losses for dialect in loss.dialects]
    return {dialect.upstream for dialect in named} | {dialect.framework for dialect in named}


def _dialects_of(registry: Registry, wanted: Sequence[str]) -> Filter:
    for upstream in wanted:
        if upstream not in (known := upstreams(registry)):
            raise _not_accepted("--dialects-of", upstream, known, "upstream")

    def keep(row: Shown) -> Shown | None:
        kept = [one for one in row[1] if one.upstream in wanted or one.framework in wanted]
        return (row[0], kept) if kept else None

    return Filter(_options("--dialects-of", wanted), keep)


def _run_by(registry: Registry, framework: str) -> Filter:
    running = _framework(registry, framework)

    def keep(row: Shown) -> Shown | None:
        provided = running.provides.get(row[0].kind, frozenset())
        kept = [one for one in row[1] if {*one.optional} <= provided]
        return (row[0], kept) if running.runs(row[0]) else None

    return Filter(f"--framework {framework}", keep)


def _framework(registry: Registry, framework: str) -> Framework:
    known = {one.name: one for one in running()}
    if framework in known:
        return known[framework]
    if framework not in upstreams(registry):
        raise _not_accepted("--framework", framework, known, "framework")
    problem = f"there is no adapter for {framework!r} yet (there is one for {', '.join(known)})"
    remedy = f"list its dialects: composer-plugins list --dialects-of {framework}"
    raise ConfigError("--framework", problem, remedy)


def _not_accepted(option: str, given: str, accepted: Iterable[str], noun: str) -> ConfigError:
    """The error for a value that an option does not accept: the nearest that it accepts, and all of them."""
    every = list(accepted) if isinstance(accepted, dict) else sorted(accepted)
    nearest = near(given, every)
    hint = f"{did_you_mean(nearest)} " if nearest else ""
    problem = f"unknown {noun} {given!r}" if given.strip() else f"no {noun} is given"
    return ConfigError(option, problem, f"{hint}{option} accepts {', '.join(every)}")
