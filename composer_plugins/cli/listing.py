"""`composer-plugins list`: the catalogue as tables, or as JSON."""

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_plugins.adapter import Adapter
from composer_plugins.catalogue import KINDS, REQUIRED, Dialect, Loss, Parameter, check_kind
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import OURS, Registry

Shown = tuple[Loss, list[Dialect]]  # a row, and those of its dialects that were asked for


def select(
    registry: Registry,
    kind: str | None = None,
    need: str | None = None,
    framework: str | None = None,
    upstream: str | None = None,
) -> list[Shown]:
    """The rows of one kind, with one input, that a framework can run, with a dialect of one upstream."""
    if kind is not None:
        check_kind(kind, "--kind")
    if need is not None and need not in INPUTS:
        raise unknown("--needs", need, INPUTS, noun="input", more="composer_plugins/inputs.py lists all")
    adapter = _adapter(registry, framework) if framework is not None else None
    if upstream is not None and upstream not in (known := upstreams(registry)):
        raise unknown("--dialects-of", upstream, known, noun="upstream")
    rows = [
        (loss, [d for d in loss.dialects if _asked(loss, d, adapter, upstream)])
        for loss in registry.losses
        if kind in (None, loss.kind)
        and (need is None or need in (*loss.needs, *loss.optional))
        and (adapter is None or adapter.runs(loss))
    ]
    return [(loss, dialects) for loss, dialects in rows if dialects or upstream is None]


def upstreams(registry: Registry) -> set[str]:
    """Every upstream that a dialect names, with its version and without."""
    named = [dialect for loss in registry.losses for dialect in loss.dialects]
    return {dialect.upstream for dialect in named} | {dialect.framework for dialect in named}


def _adapter(registry: Registry, framework: str) -> Adapter:
    adapters = {adapter.framework: adapter for adapter in registry.adapters}
    if framework in adapters:
        return adapters[framework]
    if framework not in (known := upstreams(registry)):
        raise unknown("--framework", framework, {*known, *adapters}, noun="framework")
    problem = f"there is no adapter for {framework!r} yet (there is one for {', '.join(adapters)})"
    remedy = f"list its dialects: composer-plugins list --dialects-of {framework}"
    raise ConfigError("--framework", problem, remedy)


def _asked(loss: Loss, dialect: Dialect, adapter: Adapter | None, upstream: str | None) -> bool:
    provided = adapter is None or {*dialect.optional} <= adapter.provides.get(loss.kind, frozenset())
    return provided and upstream in (None, dialect.upstream, dialect.framework)


def as_data(registry: Registry, rows: Iterable[Shown]) -> dict[str, Any]:
    """The rows as JSON can hold them."""
    return {
        "losses": [
            {
                "name": loss.name,
                "kind": loss.kind,
                "summary": loss.summary,
                "paper": loss.paper,
                "proof": loss.proof,
                "kernel": loss.path,
                "needs": list(loss.needs),
                "optional": list(loss.optional),
                "mode": loss.mode,
                "gradient": loss.gradient,
                "over_batch": loss.over_batch,
                "per_sequence": loss.per_sequence,
                "distribution": registry.origins[loss.kind, loss.name],
                "frameworks": [a.framework for a in registry.adapters if a.runs(loss)],
                "parameters": {n: _parameter(p, loss.defaults[n]) for n, p in loss.parameters.items()},
                "dialects": [
                    {
                        "name": f"{loss.name}@{d.upstream}",
                        "params": dict(d.params),
                        "mode": d.mode,
                        "denominators": dict(d.denominators),
                        "optional": list(d.optional),
                        "source": d.source,
                        "proof": d.proof,
                        "note": d.note,
                    }
                    for d in dialects
                ],
            }
            for loss, dialects in rows
        ],
        "problems": [problem._asdict() for problem in registry.problems],
    }


def print_tables(console: Console, registry: Registry, rows: list[Shown]) -> None:
    """One table to a kind: each loss with its source and its proof, its dialects below it."""
    for kind, names in KINDS.items():
        of_kind = [(loss, dialects) for loss, dialects in rows if loss.kind == kind]
        if not of_kind:
            continue
        table = Table(title=names.plural, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("name", no_wrap=True, style="cyan")
        for heading in ("what it is", "source", "proof"):
            table.add_column(heading, ratio=3, overflow="fold")
        for loss, dialects in of_kind:
            origin = registry.origins[loss.kind, loss.name]
            what = loss.summary if origin == OURS else f"{loss.summary} [plugin: {origin}]"
            table.add_row(loss.name, Text(what), Text(loss.paper), Text(loss.proof))
            for d in dialects:
                label, changes = f"  @{d.upstream}", Text(_changes(d) or "as the paper")
                table.add_row(label, changes, Text(d.source), Text(d.proof), style="dim")
        console.print(table)
        console.print()
    console.print(Text(count(rows)))


def count(rows: list[Shown]) -> str:
    """How many of each kind, in a sentence."""
    numbers = {kind: sum(loss.kind == kind for loss, _ in rows) for kind in KINDS}
    parts = [_number(n, KINDS[kind].singular, KINDS[kind].plural) for kind, n in numbers.items() if n]
    dialects = _number(sum(len(dialects) for _, dialects in rows), "a dialect", "dialects")
    return ", ".join([*parts, dialects]) if parts else "no loss matches"


def _number(n: int, one: str, many: str) -> str:
    return f"1 {one.partition(' ')[2]}" if n == 1 else f"{n} {many}"


def _changes(dialect: Dialect) -> str:
    values = [f"{name}={value}" for name, value in {**dialect.params, **dialect.denominators}.items()]
    return ", ".join([*values, *(f"with {name}" for name in dialect.optional)])


def _parameter(parameter: Parameter, default: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"help": parameter.help}
    if default is REQUIRED:
        shown["required"] = True
    else:
        shown["default"] = default
    if parameter.choices:
        return {**shown, "choices": list(parameter.choices)}
    if parameter.low != -math.inf:
        shown |= {"low": 0, "low_open": True} if parameter.low_open else {"low": parameter.low}
    return shown if parameter.high == math.inf else {**shown, "high": parameter.high}
