"""`python -m composer_plugins.recipes.openenv`: train on the environment, or serve it."""

from typing import Annotated

import typer
from rich.console import Console

from composer_plugins.recipes.shared import run_command

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the repositories, the model and the sampling.")] = 0,
    url: Annotated[str, typer.Option(help="Use the server at this address, and start none.")] = "",
) -> None:
    """Train a tiny model with the policy loss, and with the hint channel beside it."""
    if context.invoked_subcommand is not None:
        return
    from composer_plugins.recipes.openenv import train

    if not train.demo(url, steps, seed, Console(soft_wrap=True)):
        raise SystemExit(1)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen at; in a container 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: the system chooses a free one.")] = 0,
    sessions: Annotated[int, typer.Option(min=1, help="The most episodes at a time.")] = 64,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve the environment until Ctrl-C. The agent's code runs with the rights of this process."""
    from composer_plugins.recipes.openenv import server

    server.serve(host, port, sessions, until_stdin_closes=until_stdin_closes)


if __name__ == "__main__":
    run_command(app)
