"""`composer-plugins list`: the catalogue as tables, or as JSON."""

from collections.abc import Iterable
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from composer_plugins.catalogue import REQUIRED, Dialect, Kind, Loss, Parameter
from composer_plugins.errors import unknown
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import OURS, Registry

PLURALS: dict[Kind, str] = {
    "policy": "policy losses",
    "advantage": "advantages",
    "divergence": "divergences",
    "preference": "preference losses",
    "kl": "KL estimators",
    "correction": "rollout corrections",
    "aggregation": "aggregation modes",
}


def select(registry: Registry, kind: str | None, need: str | None, framework: str | None) -> list[Loss]:
    """The rows of one kind, that need one input, that one framework can run or has a dialect of."""
    if kind is not None and kind not in get_args(Kind):
        raise unknown("kind", kind, get_args(Kind))
    if need is not None and need not in INPUTS:
        raise unknown("input", need, INPUTS)
    if framework is not None and framework not in (known := frameworks(registry)):
        raise unknown("framework", framework, known)
    adapters = [a for a in registry.adapters if a.framework == framework]

    def wanted(loss: Loss) -> bool:
        return (
            (kind is None or loss.kind == kind)
            and (need is None or need in (*loss.needs, *loss.optional))
            and (
                framework is None
                or any(adapter.runs(loss) for adapter in adapters)
                or any(dialect.framework == framework for dialect in loss.dialects)
            )
        )

    return [loss for loss in registry.losses if wanted(loss)]


def frameworks(registry: Registry) -> set[str]:
    """Every framework that an adapter serves or a dialect names."""
    named = {dialect.framework for loss in registry.losses for dialect in loss.dialects}
    return named | {adapter.framework for adapter in registry.adapters}


def dialects_of(loss: Loss, framework: str | None) -> list[Dialect]:
    """Its dialects, or those of one framework."""
    return [d for d in loss.dialects if framework in (None, d.framework)]


def as_data(registry: Registry, rows: Iterable[Loss], framework: str | None) -> dict[str, Any]:
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
                "over_batch": loss.over_batch,
                "distribution": registry.origins[loss.kind, loss.name],
                "frameworks": [a.framework for a in registry.adapters if a.runs(loss)],
                "parameters": {name: _parameter(p) for name, p in loss.parameters.items()},
                "dialects": [
                    {
                        "name": f"{loss.name}@{d.upstream}",
                        "params": dict(d.params),
                        "counts": dict(d.counts),
                        "source": d.source,
                        "proof": d.proof,
                        "note": d.note,
                    }
                    for d in dialects_of(loss, framework)
                ],
            }
            for loss in rows
        ],
        "problems": [problem._asdict() for problem in registry.problems],
    }


def print_tables(console: Console, registry: Registry, rows: list[Loss], framework: str | None) -> None:
    """One table to a kind: each loss with its source and its proof, its dialects below it."""
    for kind, title in PLURALS.items():
        of_kind = [loss for loss in rows if loss.kind == kind]
        if not of_kind:
            continue
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("name", no_wrap=True, style="cyan")
        for heading in ("what it is", "source", "proof"):
            table.add_column(heading, ratio=3, overflow="fold")
        for loss in of_kind:
            origin = registry.origins[loss.kind, loss.name]
            what = loss.summary if origin == OURS else f"{loss.summary} [plugin: {origin}]"
            table.add_row(loss.name, Text(what), Text(loss.paper), Text(loss.proof))
            for d in dialects_of(loss, framework):
                changes = ", ".join(f"{name}={value}" for name, value in {**d.params, **d.counts}.items())
                label = f"  @{d.upstream}"
                table.add_row(
                    label, Text(changes or "as the paper"), Text(d.source), Text(d.proof), style="dim"
                )
        console.print(table)
        console.print()
    console.print(Text(count(rows, framework)))


def count(rows: list[Loss], framework: str | None) -> str:
    """How many of each kind, in a sentence."""
    parts = [f"{n} {title}" for kind, title in PLURALS.items() if (n := sum(r.kind == kind for r in rows))]
    return ", ".join([*parts, f"{sum(len(dialects_of(r, framework)) for r in rows)} dialects"])


def _parameter(parameter: Parameter) -> dict[str, Any]:
    shown: dict[str, Any] = {"help": parameter.help}
    if parameter.default is REQUIRED:
        shown["required"] = True
    else:
        shown["default"] = parameter.default
    if parameter.choices:
        return {**shown, "choices": list(parameter.choices)}
    bounds = {"low": parameter.low, "high": parameter.high}
    return {**shown, **{k: v for k, v in bounds.items() if abs(v) != float("inf")}}
