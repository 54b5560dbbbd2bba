"""`composer-plugins migrate`: the loss of one framework's config as a config of another framework."""

from collections.abc import Iterator
from typing import Annotated

import typer

from composer_plugins.cli import given as command_line
from composer_plugins.cli.console import answer, foreign_code
from composer_plugins.errors import ConfigError, Findings
from composer_plugins.frameworks.registry import OURS
from composer_plugins.losses.choosing import choose
from composer_plugins.objective import resolve
from composer_plugins.objective.differences import EFFECTS, effect_of
from composer_plugins.objective.keys import grouped
from composer_plugins.objective.objective import MISSING, of_choice

FRAMEWORKS = ", ".join(one.name for one in OURS if resolve.is_readable(one))
CHANGES = "What is trained changes, the most important first:"
SMALL = "Only extreme values change, or all by as little as rounding:"


def migrate(
    context: typer.Context,
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE|-- WORD",
            help="The config to read: a YAML, or TOML files of PRIME-RL. Options (key=value) replace those "
            "of the file, or stand alone. After --: the words of the framework's own command line.",
        ),
    ] = None,
    to: Annotated[str, typer.Option("--to", help=f"The framework to write for: {FRAMEWORKS}.")] = "",
    source: Annotated[
        str, typer.Option("--from", help=f"The framework of the file: {FRAMEWORKS}.", show_default=False)
    ] = "",
    loss: Annotated[
        str, typer.Option(help="Instead of a file: a policy loss of the catalogue (grpo@verl, cispo).")
    ] = "",
    version: Annotated[
        str | None, typer.Option(help="PRIME-RL's version, if it is not the newest that was tested.")
    ] = None,
) -> None:
    """Print a config with the same mathematics for another framework, and what differs.

    The differences are comments at the top. Exit status 0: the two are the same up to the named denominator
    of each; 1: something differs, and it is listed; 2: it cannot be done.
    """
    if bool(loss) == bool(given or context.obj is not None):
        problem = "both are given" if loss else "neither is given"
        raise ConfigError("FILE, --loss", problem, "give a config file, or --loss with the name of a loss")
    if loss and source:
        raise ConfigError("--from", "--loss names a loss of no framework's file", "remove one of them")
    if source:
        check(source, "--from")
    check(to, "--to")
    given_here = command_line.read(given or (), source, context.obj)
    if not loss:
        check(source, "--from")
    if version is not None and "prime-rl" not in (source, to):
        raise ConfigError("--version", "only versions of PRIME-RL are told apart", "remove it")
    with foreign_code():
        if loss:
            read, name = of_loss(loss), loss
        else:
            read = resolve.resolve(source, given_here.table(), version)
            name = f"{given_here.what} of {source}"
        objective = read.required()
        found = resolve.migrate(objective, to, version)
    versions = f"Written for {resolve.configs_of(to).release(version)}."
    if read.release:
        versions = f"Read as a config of {read.release}. {versions}"
    lines = [f"# {line}".rstrip() for line in (versions, *comments(name, to, found, read))]
    answer("\n".join([*lines, found.text]), nl=False)
    if found.differences:
        raise typer.Exit(1)


def of_loss(name: str) -> resolve.Resolved:
    """A loss of the catalogue as what a config asks for."""
    try:
        objective = of_choice(choose("policy", name, option="--loss"))
        return resolve.Resolved(objective, Findings(), (), "")
    except ConfigError as error:
        if error.key == "--loss":
            raise
        problem = f"{name!r} needs a value: {error.problem}"
        raise ConfigError("--loss", problem, "give a config file that sets it") from None


def check(framework: str, option: str) -> None:
    """Raise ConfigError at the option that names a framework, if its configs cannot be read and written."""
    if framework not in resolve.readable():
        raise resolve.unreadable(option, framework, resolve.readable())


def comments(name: str, to: str, found: resolve.Migrated, read: resolve.Resolved) -> Iterator[str]:
    """What was not looked at, what the written config is, and each difference in a line."""
    unread = read.unread
    if unread:
        yield f"Not looked at: {' '.join(grouped(unread).split())}"  # in YAML a key may have several lines
    yield f"The loss of {name}, for {to}. Written by composer-plugins migrate."
    for error in read.errors:
        yield f"To correct in the config that was read: {error}"
    if not found.differences:
        yield "Nothing that is known here differs." if unread else "Nothing differs."
        return
    number = len(found.differences)
    yield f"{number} of its properties differ{'s' * (number == 1)}:"
    for is_small, head in ((False, CHANGES), (True, SMALL)):
        group = [one for one in found.differences if one.is_small is is_small]
        if group:
            yield head
        for key, effect in EFFECTS.items():
            if alike := [one for one in group if effect_of(one.what) == key]:
                yield from (f"  {one}" for one in alike)
                yield f"    {effect.meaning} {effect.remedy}"
    if any(MISSING not in one.target for one in found.differences):
        yield f"Where no remedy is named, {to} has no option for it."
