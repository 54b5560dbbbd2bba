"""`composer-plugins migrate`: the loss of one framework's config as a config of another framework."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from composer_plugins import migration
from composer_plugins.catalogue import choose
from composer_plugins.errors import ConfigError, in_a_line, unknown
from composer_plugins.plugins import losses

FRAMEWORKS = ", ".join(migration.MODULES)
SCIENTIFIC = set("0123456789+-.eE")  # the characters of 1e-3


def migrate(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The config to read: a YAML of TRL or verl, a TOML of PRIME-RL.", show_default=False
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
    if bool(loss) == (file is not None):
        given = "both are given" if loss else "neither is given"
        raise ConfigError("FILE, --loss", given, "give a config file, or --loss with the name of a loss")
    if loss:
        try:
            chosen = choose(losses(), "policy", loss, option="--loss")
        except ConfigError as error:
            if error.key == "--loss":
                raise
            problem = f"{loss!r} needs a value: {error.problem}"
            raise ConfigError("--loss", problem, "give a config file that sets it") from None
        objective, name = migration.of_choice(chosen), loss
    else:
        assert file is not None
        if source not in migration.MODULES:
            raise unknown("--from", source, migration.MODULES, noun="framework")
        objective, name = migration.read(source, table_of(file), version), f"{file} of {source}"
    if to not in migration.MODULES:
        raise unknown("--to", to, migration.MODULES, noun="framework")
    found = migration.migrate(objective, to, version)
    for line in comments(name, to, found, objective.unread):
        typer.echo(f"# {line}".rstrip())
    typer.echo(found.text, nl=False)
    if found.differences:
        raise typer.Exit(1)


def comments(name: str, to: str, found: migration.Migrated, unread: Sequence[str]) -> Iterator[str]:
    """What the written config is, what was not read for it, and each difference in a line."""
    yield f"The loss of {name}, for {to}. Written by composer-plugins migrate."
    if unread:
        yield f"Not looked at, because no loss reads such a key, or it is misspelt: {', '.join(unread)}"
    if not found.differences:
        yield "Nothing differs."
        return
    number = len(found.differences)
    yield f"{number} of its properties differ{'s' * (number == 1)}:"
    for difference in found.differences:
        yield f"  {difference}"


def table_of(file: Path) -> dict[str, Any]:
    """A YAML or a TOML file as a table."""
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            return tomllib.loads(text)
        found = numbers(yaml.safe_load(text))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise ConfigError(str(file), problem, "name a file that exists") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(str(file), f"cannot be parsed: {in_a_line(error)}", "correct it") from None
    if not isinstance(found, dict):
        raise ConfigError(str(file), f"it holds {found!r}", "give a file with a table of options")
    return found


def numbers(value: Any) -> Any:
    """The value with 1e-3 as a number, as verl's parser has it; YAML 1.1 takes it for a string."""
    if isinstance(value, Mapping):
        return {key: numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    if isinstance(value, str) and set(value) <= SCIENTIFIC:
        with suppress(ValueError):
            return float(value)
    return value
