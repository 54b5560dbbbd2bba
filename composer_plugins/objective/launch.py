"""What a script gives a framework: its config files and its options, and what of them is not known.

A shell script is read for the command that starts the framework's training (`Framework.programs`), a Python
script for the call that makes the framework's config (`Framework.config_classes`). Neither is executed.
"""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import yaml

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.findings import Finding
from composer_plugins.frameworks.contract import NOTHING, Framework
from composer_plugins.objective.files import of_yaml
from composer_plugins.objective.python_script import GIVE, calls, changes, unknown
from composer_plugins.objective.shell import MOST, TooLong, commands
from composer_plugins.objective.shell_words import EMPTY, Word

SUFFIXES = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".py")  # of scripts
OVERRIDE = re.compile(r"[+~]*[A-Za-z_]\w*(\.[\w-]+)+=")
FILES = ("--config", "@")  # what names a config file on a command line with options
HYDRA_OPTIONS = {"-cp": "--config-path", "-cd": "--config-dir", "-cn": "--config-name"}
SHELLS = ("bash", "sh", "zsh")
ADDING = ("xargs", "parallel")  # programs that add words to a command


class Launch(NamedTuple):
    """What a script gives the framework that it starts."""

    framework: Framework
    files: tuple[Path, ...] = ()
    overrides: tuple[str, ...] = ()
    config: str = ""  # the name of a config of the framework's own
    findings: tuple[Finding, ...] = ()  # what is not known of it, by its key, and what does not reach it
    exported: Mapping[str, str] = NOTHING  # the environment that the script sets


def launch(script: str, known: Iterable[Framework]) -> Launch:
    """What a script gives the framework of `known` that it starts. `script` may end in :LINE.

    Raises ConfigError where none is started, or several times with other options.
    """
    path, line = Path(script), None
    if not path.exists() and (found := re.fullmatch(r"(.+):(\d+)", script)):
        path, line = Path(found[1]), int(found[2])
    known = tuple(known)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {in_a_line(error)}", "name a text file") from None
    read = of_python if path.suffix == ".py" else of_shell
    found_here = {at: one for at, one in read(path, text, known) if line in (None, at)}
    if not found_here:
        programs = sorted({name.lstrip("*.") for one in known for name in one.programs})
        problem = f"it starts no training that is known ({', '.join(programs)})"
        problem += "" if line is None else f" in line {line}"
        raise ConfigError(script, problem, "give the script that does, or the config file itself")
    first, *others = found_here.values()
    if all(one.framework is first.framework for one in others) and first.framework.has_several_files:
        return Launch(
            first.framework,
            tuple(dict.fromkeys(file for one in found_here.values() for file in one.files)),
            tuple(dict.fromkeys(given for one in found_here.values() for given in one.overrides)),
            findings=tuple(dict.fromkeys(x for one in found_here.values() for x in one.findings)),
        )
    if any(one._replace(exported=NOTHING) != first._replace(exported=NOTHING) for one in others):
        lines = list(map(str, found_here))
        problem = f"it starts training in the lines {', '.join(lines)}, with other options"
        raise ConfigError(script, problem, f"name one of them: {path}:{lines[0]}")
    return first


# A shell script.


def of_shell(
    path: Path, text: str, known: Sequence[Framework], is_outer: bool = True
) -> Iterator[tuple[int, Launch]]:
    """Yield what each command that starts a framework is given, with its line."""

    def sourced(name: str) -> str | None:
        file = found_file(name, path.parent)
        return None if file is None else file.read_text(errors="replace")

    try:
        found, wrong, written = commands(text, sourced, str(path.parent))
    except TooLong:
        problem = f"more than {MOST} commands would have to be followed through its functions and loops"
        remedy = "give the command that starts the training alone, in a file of its own"
        raise ConfigError(str(path), problem, remedy) from None
    remedy = (
        "end the line before it with a backslash, with nothing behind it and no comment within the command"
    )
    unread = [
        Finding("error", f"{path}:{one.line}", f"{one.words[0].text} is run as a command of its own", remedy)
        for one in found
        if OVERRIDE.match(one.words[0].text)
    ]
    problem = "this is not read, because it is not understood as bash"
    remedy = f"correct it; or, if bash takes it, {GIVE}"
    unread += [Finding("warning", f"{path}:{line}", problem, remedy) for line in wrong]
    for one in found:
        for inner, following in scripts_run(one.words, path) if is_outer else ():
            text = inner.read_text(encoding="utf-8", errors="replace")
            for _, launched in of_shell(inner, text, known, is_outer=False):
                more = reader(launched.framework)(launched.framework, following, path.parent)
                yield (
                    one.line,
                    launched._replace(
                        files=(*launched.files, *more.files),
                        overrides=(*launched.overrides, *more.overrides),
                        findings=(*unread, *launched.findings, *more.findings),
                    ),
                )
        for framework in known:
            for launched in started(framework, one.words, path.parent):
                own = [file for file in launched.files if not _is_written(file, written, path.parent)]
                problem = f"{path.name} writes it itself, so what is here may be an earlier one"
                stale = [Finding("warning", str(x), problem, GIVE) for x in launched.files if x not in own]
                findings = (*unread, *launched.findings, *stale)
                yield (
                    one.line,
                    launched._replace(files=tuple(own), findings=findings, exported=dict(one.exported)),
                )


def scripts_run(words: tuple[Word, ...], path: Path) -> Iterator[tuple[Path, tuple[Word, ...]]]:
    """Yield another script that a command runs (`bash run.sh key=value`), with the words that follow it.

    Only one that hands its arguments on ("$@") is meant.
    """
    for number, word in enumerate(words):
        if number and words[number - 1].text.rpartition("/")[2] in SHELLS and not word.unknown:
            file = found_file(word.text, path.parent)
            is_other = file is not None and file.resolve() != path.resolve()
            if file is not None and is_other and "$@" in file.read_text(encoding="utf-8", errors="replace"):
                yield file, words[number + 1 :]


def reader(framework: Framework) -> Callable[[Framework, Sequence[Word], Path], Launch]:
    """How the words of a framework's command line are read."""
    return of_hydra if framework.is_hydra else of_options


def _is_written(file: Path, written: Iterable[str], folder: Path) -> bool:
    places = (place / name for name in written for place in (Path(), folder))
    return file.resolve() in [place.resolve() for place in places]


def started(framework: Framework, words: tuple[Word, ...], folder: Path) -> Iterator[Launch]:
    """Yield what a command gives the framework, if it starts it."""
    for number, word in enumerate(words):
        if length := starts(framework, words, number):
            launched = reader(framework)(framework, words[number + length :], folder)
            if any(one.text.rpartition("/")[2] in ADDING for one in words[:number]):
                more = Finding("warning", words[0].text, "it adds words that are not known", GIVE)
                launched = launched._replace(findings=(*launched.findings, more))
            yield launched
            return
        if (
            framework.config_classes
            and word.text.endswith(".py")
            and (script := found_file(word.text, folder))
        ):
            text = script.read_text(encoding="utf-8", errors="replace")
            if any(one in text for one in framework.config_classes):
                if by_call := [one for _, one in of_python(script, text, [framework])]:
                    yield from by_call
                    return
                by_option = of_options(framework, words[number + 1 :], folder)
                found = (*by_option.findings, *changes(parsed(script, text), framework))
                yield by_option._replace(findings=found)
                return


def starts(framework: Framework, words: tuple[Word, ...], number: int) -> int:
    """How many words from this one on are the program of a framework; 0 if none."""
    given = {one.text.partition("=")[0] for one in words}
    if framework.telling and given.isdisjoint(framework.telling):
        return 0
    for program in framework.programs:
        first, *others = program.split()
        here = [one.text for one in words[number : number + 1 + len(others)]]
        module = f".{here[0].removesuffix('.py').replace('/', '.')}"
        is_command = module == f".{here[0]}" and "." not in here[0]  # and not a module, or a file
        if here[1:] != others or not fnmatch(here[0] if is_command else module, first):
            continue
        before = [one.text for one in words[:number]]
        if not is_command or not before or before[-1] == "--" or {"run", "launch"} & set(before):
            return len(here)
    return 0


def found_file(name: str, folder: Path) -> Path | None:
    """A file that a script names, from the working folder, the script's, or one above that."""
    places = [Path(), folder, *folder.resolve().parents]
    return next((place / name for place in places if (place / name).is_file()), None)


def of_hydra(framework: Framework, words: Sequence[Word], folder: Path) -> Launch:
    """What hydra is given: its options for the config, and overrides."""
    options, overrides, findings = dict[str, str](), list[str](), list[Finding]()
    left = iter(words)
    for word in left:
        key, sign, value = word.text.partition("=")
        name = HYDRA_OPTIONS.get(key, key)
        if name in HYDRA_OPTIONS.values():
            following = word if sign else next(left, EMPTY)
            findings += not_known(name, following.unknown)
            if not following.unknown:
                options[name] = value if sign else following.text
        elif word.unknown:
            findings += not_known(key.lstrip("+~"), word.unknown)
        elif sign or key.startswith("~"):
            overrides.append(word.text)
        elif not key.startswith("-"):
            findings.append(Finding("error", key, "hydra takes no word like this", "write key=value"))
    config = options.get("--config-name", "").removesuffix(".yaml")
    place = options.get("--config-path", options.get("--config-dir"))
    files = list[Path]()
    if config and place is not None:
        name = f"{place}/{config}.yaml"
        file = found_file(name, folder)
        is_own = file is None and config in framework.configs and Path(place).name == "config"
        files += [file] if file else []
        config = config if is_own else ""
        if file is None and not is_own:
            findings.append(
                Finding("warning", "--config-name", f"{name} is not found here", "give the file too")
            )
    return Launch(framework, tuple(files), tuple(overrides), config, tuple(findings))


def of_options(framework: Framework, words: Sequence[Word], folder: Path) -> Launch:
    """What a command line like `--config FILE --beta 0.1 --no_shuffle @ FILE` is given."""
    files, overrides, findings = list[Path](), list[str](), list[Finding]()
    table = ""  # of an option without a value before "@ FILE": the file stands in this table
    groups, text_options = [*grouped(words), ("", [])], texts_of(framework)
    for (key, values), (following, _) in pairwise(groups):
        reason = next((one.unknown for one in values if one.unknown), "")
        if reason:
            findings += not_known(key if key in FILES else key.lstrip("-").replace("-", "_"), reason)
        elif key in FILES:
            for one in values:
                file = found_file(one.text, folder)
                overrides += [f"{table}=@{file}"] if file and table else []
                files += [file] if file and not table else []
                table = ""
                if file is None:
                    problem = f"{one.text} is not found here"
                    findings.append(Finding("warning", key, problem, "give the file too"))
        elif "=" in key or not key.startswith("--"):
            overrides.append(key)
        elif following == "@" and not values:
            table = key.lstrip("-").replace("-", "_")
        else:
            name = key.lstrip("-").replace("-", "_")
            texts = [one.text for one in values]
            value = texts[0] if len(texts) == 1 else json.dumps(texts) if texts else "true"
            is_text = is_no_yaml(value) or (name in text_options and not isinstance(of_yaml(value), str))
            is_negated = not texts and name.startswith("no_") and name[3:] not in text_options
            value = json.dumps(value) if is_text and texts == [value] else value
            overrides.append(f"{name[3:]}=false" if is_negated else f"{name}={value}")
    return Launch(framework, tuple(files), tuple(overrides), findings=tuple(findings))


def is_no_yaml(value: str) -> bool:
    """Whether a value is a text that YAML does not read, as ([0]*3+[1]*45)."""
    try:
        of_yaml(value)
    except (ValueError, yaml.YAMLError):
        return True
    return False


def texts_of(framework: Framework) -> set[str]:
    """The options of a framework whose value is a text by their type."""
    return {one.key for one in framework.options if isinstance(one.default, str)}


def grouped(words: Sequence[Word]) -> list[tuple[str, list[Word]]]:
    """Each option of a command line with its values; a word without an option stands for itself.

    So does a word that is not known behind a value, and an array: it may be options.
    """
    found, more = list[tuple[str, list[Word]]](), 0  # how many words the last option still takes
    for word in words:
        name, sign, value = word.text.partition("=")
        if word.text.startswith("@"):
            name, sign, value, more = "@", word.text[1:], word.text[1:], 1
        elif name.startswith("--"):
            more = len(words)
        elif word.unknown and (word.is_many or (found and found[-1][1])):
            name, sign, value = word.text, "=", word.text
        elif more and not OVERRIDE.match(word.text):
            found[-1][1].append(word)
            more -= 1
            continue
        else:
            name, sign, value = word.text, "=", word.text
        found.append((name, [Word(value, word.unknown)] if value else []))
        more = 0 if sign else more
    return found


def not_known(key: str, why: str) -> list[Finding]:
    """The finding for an option or a file whose value is not known; none if `why` is empty."""
    remedy = "give the file after the script, to have it examined too" if key in FILES else GIVE
    return [unknown(key, why, remedy)] if why else []


# A Python script.


def of_python(path: Path, text: str, known: Sequence[Framework]) -> Iterator[tuple[int, Launch]]:
    """Yield what each call that makes a framework's config is given, with its line."""
    tree = parsed(path, text)
    for framework in known:
        found = list(calls(tree, framework))
        changed = tuple(dict.fromkeys(changes(tree, framework))) if found else ()
        for call in found:
            yield (
                call.line,
                Launch(framework, overrides=call.overrides, findings=(*call.findings, *changed)),
            )


def parsed(path: Path, text: str) -> ast.Module:
    """The syntax tree of a script; ConfigError for a text that is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(str(path), f"is not Python: {in_a_line(error)}", "correct it") from None
