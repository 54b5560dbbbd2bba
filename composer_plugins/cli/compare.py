"""`composer-plugins compare`: what losses would do with a recorded batch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.padding import Padding

from composer_plugins.cli.completion import KindOption, complete_loss
from composer_plugins.cli.console import answer, foreign_code, page, table
from composer_plugins.errors import ConfigError, writing
from composer_plugins.losses.choosing import Choice, find
from composer_plugins.losses.registry import registry

if TYPE_CHECKING:
    from composer_plugins.comparing import Step

VALUES = 6  # columns of the first table, so that each fits into 80 columns of the terminal
OUTCOMES = {
    True: "{ran} ran, and its run logged {logged:.4g}. The loss computed again from the record is equal.",
    False: "{ran} ran, and its run logged {logged:.4g}. Computed again it is {recomputed:.4g}: not equal.",
    None: "The loss that ran ({ran}) cannot be computed again: its name, value or an input is not recorded.",
}
Rows = Sequence[Mapping[str, Any]]
LOSSES = typer.Argument(metavar="LOSS...", help="Losses; all without one.", autocompletion=complete_loss)
SWEEP = typer.Option(help="Values of a parameter: clip_high=0.1,0.2,0.4.")
AGAINST = typer.Option(help="Other batches, to compare the losses that ran.")
TOKENIZER = typer.Option(exists=True, dir_okay=False, help="A tokenizer.json, for the texts of --tokens.")


def compare(
    folder: Annotated[Path, typer.Argument(help="Recorded batches: a folder or a file.")],
    names: Annotated[list[str] | None, LOSSES] = None,
    step: Annotated[int | None, typer.Option(help="A recorded step; the newest without it.")] = None,
    sweep: Annotated[list[str] | None, SWEEP] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Show so many tokens with the largest weights.")] = 0,
    tokenizer: Annotated[Path | None, TOKENIZER] = None,
    against: Annotated[Path | None, AGAINST] = None,
    kind: KindOption = None,
    out: Annotated[Path | None, typer.Option(help="Write an HTML, PNG or SVG file too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure losses on a recorded batch: value, gradient, and the tokens that a clip leaves without one.

    The first row is the loss that ran, and "cosine" compares the gradients with the gradient of that loss. A
    weight is |d loss / d log pi| / |A| of a token, and ESS is the effective sample size of the weights. With
    --against, the exit status is 1 unless both losses that ran are, computed again, what their runs logged.
    """
    from composer_plugins import comparing

    with foreign_code():
        found = [comparing.Step.read(path, step, kind) for path in (folder, against) if path]
        about, ids = found[0].about, found[0].whole.get("ids")
        chosen = choices(kind or about.kind, names or (), sweep or ()) if names or not against else {}
        ran = {f"{one.ran.name} ({one.path})": one.ran for one in found if against and one.ran}
        others = [{key: x for key, x in ran.items() if x is not one.ran} for one in found]
        made = [comparing.compare(one, other | chosen) for one, other in zip(found, others, strict=True)]
    records = [described(one) | {"losses": rows} for one, (_, rows) in zip(found, made, strict=True)]
    measured, text = made[0][0], text_of(about.extra.get("texts"), tokenizer)
    largest = [x for one in measured if ids is not None for x in one.largest(tokens, ids, text)]
    if as_json:
        answer(json.dumps({"records": records, "tokens": largest}, indent=2))
    else:
        show(page(), records, largest)
    if out:
        from composer_plugins.plotting import drawing, recorded

        picture = recorded.picture(measured, f"Step {records[0]['step']} of {folder}")
        if out.suffix.lower() == ".html":
            show(console := Console(file=StringIO(), record=True, width=120), records, largest)
            with writing("--out", out):
                out.write_text(recorded.page(picture, console.export_text()))
        else:
            drawing.write(picture, out)
    if against and not all(one["equal"] for one in records):
        raise typer.Exit(1)


def choices(kind: str, names: Sequence[str], sweep: Sequence[str]) -> dict[str, Choice]:
    """Return each loss, or all of the kind, with each combination of the parameters, by its label.

    A parameter without a default has an example value.
    """
    from composer_plugins.plotting.kinds import filled

    swept = dict[str, list[Any]]()
    for name, _, values in (one.partition("=") for one in sweep):
        if not values:
            raise ConfigError("--sweep", f"{name!r} has no values", "write NAME=VALUE,VALUE")
        # YAML 1.1 takes 3e-4 for a text, and 3.0e-4 for a number.
        parts = [one if "." in one else re.sub(r"(?<=\d)e(?=-)", ".0e", one) for one in values.split(",")]
        swept[name] = [*swept.get(name, []), *map(yaml.safe_load, parts)]
    made = dict[str, Choice]()
    for name in names or [row.name for row in registry().losses if row.kind == kind]:
        (one,) = find(registry(), name, kind, "LOSS")
        for each in product(*swept.values()):
            params = filled(one) | dict(zip(swept, each, strict=True))
            label = " ".join([name, *(f"{key}={x}" for key, x in params.items())])
            made[label] = replace(one, params={**one.params, **one.loss.check(params, "--sweep")})
    return made


def described(step: "Step") -> dict[str, Any]:
    """Return what is known of a recorded step; `equal` is None where the loss that ran has no value."""
    return {
        "record": str(step.path),
        "step": step.about.step,
        "framework": f"{step.about.framework} {step.about.version}".strip(),
        "rows": max(len(x) for x in step.whole.values() if x.dim()),
        "tokens": int(step.whole["mask"].sum()) if "mask" in step.whole else 0,
        "ran": step.ran.described if step.ran else step.about.name or "not known",
        **step.reproduced(),
    }


def show(console: Console, records: Rows, tokens: Rows) -> None:
    """Print each record with its losses, and the tokens with the largest weights."""
    for one in records:
        console.print("Step {step} of {record}: {rows} rows, {tokens} tokens, {framework}.".format(**one))
        console.print(OUTCOMES[one["equal"]].format(**one), "", sep="\n")
        if measured := [row for row in one["losses"] if "problem" not in row]:
            first, *keys = measured[0]
            for part in (keys[:VALUES], keys[VALUES:]):
                console.print(grid(measured, [first, *part]), "", sep="\n")
        for problem in [row["problem"] for row in one["losses"] if "problem" in row]:
            console.print(problem, "", sep="\n", soft_wrap=True)
    if tokens:
        console.print(grid(tokens, [*tokens[0]]), "", sep="\n")


def grid(rows: Rows, keys: Sequence[str]) -> Padding:
    """Return a table with these keys as headings, numbers with four digits, and texts in a line."""
    headings = [key.replace("_", "\n") for key in keys]
    numbers = [heading for heading in headings if heading not in ("loss", "denominator", "text")]
    return table([[written(row[key]) for key in keys] for row in rows], headings, right=numbers)


def written(x: Any) -> str:
    """Return a number with four digits, or a text in one line."""
    return "-" if x is None else f"{x:.4g}" if isinstance(x, float) else repr(str(x))[1:-1]


def text_of(recorded: Any, tokenizer: Path | None) -> Callable[[list[int]], str]:
    """Return a function from ids to their text: by the tokenizer, or by the record; otherwise the ids."""
    if tokenizer is None:
        return lambda ids: "".join((recorded or {}).get(str(one), f"<{one}>") for one in ids)
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    return lambda ids: str(read.decode(ids, skip_special_tokens=False))
