"""Readers of agents' logs: each finds the points at which the model acted."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from composer_plugins.errors import ComposerError, ConfigError, DataError, in_a_line, unknown
from composer_plugins.recipes.trace_replay.formats import (
    claude_code,
    codex,
    openai_chat,
    responses,
    verifiers_rollouts,
)
from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Tally,
    Tools,
    function_tools,
    json_lines,
)

FORMATS = {
    "claude-code": claude_code,
    "codex": codex,
    "responses": responses,
    "openai": openai_chat,
    "verifiers": verifiers_rollouts,
}


def log_files(logs: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each log file with its name in messages; of a folder, every *.jsonl file below it."""
    if not logs:
        raise ConfigError("LOGS", "no log is given", "name log files, or folders with *.jsonl files")
    files = list[tuple[Path, str]]()
    for log in logs:
        if log.is_dir():
            found = sorted(one for one in log.rglob("*.jsonl") if one.is_file())
            if not found:
                raise ConfigError(str(log), "the folder has no *.jsonl file", "name a folder that holds logs")
            files += [(one, str(one.relative_to(log.parent))) for one in found]
        elif log.is_file():
            files.append((log, log.name))
        else:
            raise ConfigError(str(log), "there is no such file or folder", "name log files or folders")
    return files


def read_logs(
    files: Sequence[tuple[Path, str]],
    name: str | None,
    tools: Tools | None,
    tally: Tally,
    *,
    is_strict: bool = True,
) -> Iterator[Acted]:
    """Each action of the logs, in their format, or in the format `name`.

    A file that cannot be read is an error; without `is_strict` it is skipped, and named in `tally`. If every
    file is one, the first error is raised.
    """
    if name is not None and name not in FORMATS:
        raise unknown("--format", name, FORMATS, noun="format", guess=False)
    errors = list[ComposerError]()
    for path, label in files:
        own = Tally()
        try:
            found = list(_read(path, label, name, tools, own))
        except ComposerError as error:
            errors.append(error)
            if is_strict or len(errors) == len(files):
                raise errors[0] from error
            tally.skipped[label] = f"{error.key}: {error.problem}"
            continue
        tally.lines.update(own.lines)
        tally.actions.update(own.actions)
        yield from found


def _read(path: Path, label: str, name: str | None, tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    try:
        module = FORMATS[name] if name else _format_of(path, label)
        if module is None:
            tally.lines["file without a line"] += 1
            return
        for acted in module.read(path, label, tools, tally):
            # Claude Code names its messages; of other logs only the file itself is the same file.
            if module is not claude_code:
                acted = acted._replace(key=f"{path.resolve()}{acted.key.removeprefix(label)}")
            yield acted
    except OSError as error:
        problem = f"cannot be read: {in_a_line(error)}"
        raise ConfigError(str(path), problem, "name a readable file") from None
    except ComposerError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        problem = f"a value in it is not of the type that its format says ({in_a_line(error)})"
        raise DataError(label, problem, "repair the log, or leave it out") from error


def _format_of(path: Path, label: str) -> ModuleType | None:
    """The format of a file by its first line; None if it is empty."""
    for where, row in json_lines(path, label, Tally()):
        for module in FORMATS.values():
            if module.recognises(row):
                return module
        problem = f"the line is of no known format, its fields are {', '.join(sorted(row)) or 'none'}"
        raise DataError(where, problem, f"give logs of one of these formats: {', '.join(FORMATS)}")
    return None


def read_tools(path: Path) -> Tools:
    """The tools of a JSON file: a list of OpenAI function tools."""
    try:
        tools = function_tools(str(path), json.loads(path.read_text(encoding="utf-8")))
        problem = f"{path} has no tools"
    except DataError as error:
        tools, problem = None, f"{path}: {error.problem}"
    except (OSError, ValueError, RecursionError) as error:
        tools, problem = None, f"{path} cannot be read: {in_a_line(error)}"
    if not tools:
        raise ConfigError("--tools", problem, "give a JSON file with a list of OpenAI function tools")
    return tools
