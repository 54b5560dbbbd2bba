"""`composer-plugins health`: what is wrong with a run, by what it logged."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from composer_plugins.cli.console import answer, page
from composer_plugins.cli.doctor import count, print_finding
from composer_plugins.health.logs import ACCEPTED, examine, read


def health(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG", help=f"{ACCEPTED}. Several are one run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a run, by what it logged.

    Exit status 0: nothing was found; 1: something was found; 2: a log could not be read.
    """
    log = read(logs)
    troubles, unseen = examine(log)
    if as_json:
        findings = [{"step": step, **finding._asdict()} for step, finding in troubles]
        answer(json.dumps({"findings": findings, "not_looked_at": unseen}, indent=2))
    else:
        console = page()
        for _, finding in troubles:
            print_finding(console, finding)
        if unseen:
            text = f"Not looked at, because the log has no metric for it: {', '.join(unseen)}"
            console.print(Text(text, "dim"), soft_wrap=True)
        found, last = count([finding for _, finding in troubles]), max(max(values) for values in log.values())
        console.print(Text(f"{len(log)} metrics up to step {last}: {found}"))
    if troubles:
        raise typer.Exit(1)
