"""Readers of agents' logs: each finds the points at which the model acted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from composer_plugins.errors import ComposerError, ConfigError, DataError, in_a_line
from composer_plugins.recipes.trace_replay.formats import claude_code, openai_chat
from composer_plugins.recipes.trace_replay.formats.common import (
    Acted,
    Tally,
    Tools,
    function_tools,
    json_lines,
    parsed,
)

READERS = (openai_chat, claude_code)


def log_files(logs: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each log file with its name in messages; of a folder, every *.jsonl file below it."""
    files = dict[Path, str]()
    for log in logs:
        found = sorted(one for one in log.rglob("*.jsonl") if one.is_file()) if log.is_dir() else [log]
        if not log.exists() or not found:
            problem = "the folder has no *.jsonl file" if log.exists() else "there is no such file or folder"
            raise ConfigError(str(log), problem, "name log files, or folders with *.jsonl files")
        for one in found:
            files.setdefault(one.resolve(), str(one.relative_to(log.parent)))
    return list(files.items())


def read_logs(files: Sequence[tuple[Path, str]], tools: Tools | None, tally: Tally) -> Iterator[Acted]:
    """Each action of the logs. A file that cannot be read is skipped, and named in `tally`.

    If every file is one, the first error is raised.
    """
    errors = list[ComposerError]()
    for path, label in files:
        own = Tally()
        try:
            found = _read(path, label, tools, own)
        except ComposerError as error:
            errors.append(error)
            if len(errors) == len(files):
                raise errors[0] from error
            tally.skipped[label] = f"{error.key}: {error.problem}"
            continue
        tally.lines.update(own.lines)
        tally.actions.update(own.actions)
        yield from found


def _read(path: Path, label: str, tools: Tools | None, tally: Tally) -> list[Acted]:
    try:
        first = next(json_lines(path, label, Tally()), None)
        if first is None:
            tally.lines["file without a line"] += 1
            return []
        return list(_reader_of(*first).read(path, label, tools, tally))
    except OSError as error:
        raise ConfigError(label, f"it cannot be read: {in_a_line(error)}", "name a readable file") from None


def _reader_of(where: str, row: dict[str, Any]) -> ModuleType:
    """The reader of a file by its first line."""
    for reader in READERS:
        if reader.recognises(row):
            return reader
    problem = f"the line is of no known format, its fields are {', '.join(sorted(row)) or 'none'}"
    raise DataError(where, problem, "give logs of Claude Code, or of OpenAI chat")


def read_tools(path: Path) -> Tools:
    """The tools of a JSON file: a list of OpenAI function tools."""
    try:
        tools = function_tools(parsed(path.read_text(encoding="utf-8")))
        problem = f"{path} has no tools"
    except Exception as error:  # of the file, of its JSON, or a value that is absent or of another type
        tools, problem = None, f"{path} cannot be read: {in_a_line(error)}"
    if not tools:
        raise ConfigError("--tools", problem, "give a JSON file with a list of OpenAI function tools")
    return tools
