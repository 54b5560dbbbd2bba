"""`composer-plugins list`: the losses that a search and filters keep, one to a line, as tables or as JSON."""

import json
import math
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli.completion import complete_kind
from composer_plugins.cli.console import answer, complain, foreign_code, installed, page, table
from composer_plugins.errors import ConfigError, did_you_mean, near, spelling, unknown
from composer_plugins.frameworks.registry import other_names, running
from composer_plugins.losses.choosing import PARTS, mentions
from composer_plugins.losses.registry import OURS, Problem, Registry
from composer_plugins.losses.row import KINDS, REQUIRED, Dialect, Loss, Parameter

Shown = tuple[Loss, list[Dialect]]  # a row, and the dialects that were asked for

ARXIV = "https://arxiv.org/abs/"
# The fields of a loss and of a dialect that JSON has as they are.
OF_A_LOSS: tuple[str, ...] = (
    *("name", "kind", "summary", "paper", "proof", "needs", "optional", "mode", "average", "gradient"),
    *("over_batch", "per_sequence"),
)
OF_A_DIALECT = ("params", "mode", "average", "denominators", "optional", "source", "proof", "note")
IMPORT_PATH = "an import path"  # where a loss is from that no distribution has registered


def list_losses(
    search: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only losses with these words in the name, paper or summary, or in what frameworks call "
            "them: gspo, 2402.03300, vanilla, epsilon_high ..."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these kinds: policy, advantage, divergence ...", autocompletion=complete_kind
        ),
    ] = None,
    needs: Annotated[
        list[str] | None, typer.Option(help="Only losses with all these inputs: ref_logprobs ...")
    ] = None,
    framework: Annotated[
        list[str] | None,
        typer.Option(help="Only losses that the adapters of all these frameworks can run: trl ..."),
    ] = None,
    dialects_of: Annotated[
        list[str] | None, typer.Option(help="Only the dialects of these upstreams: trl, verl, verl<0.7.1 ...")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="With the paper of each loss, the test that proves it, and the dialects of frameworks.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every parameter.")] = False,
) -> None:
    """List the losses, one to a line, with the frameworks that run each.

    Each option may be repeated. With --json the kernels of plugins are called once, on six tokens, to see
    what they return; `check` and `explain` call them too.

    A fault of an installed plugin is printed to stderr, and the exit status is then 1.
    """
    registry = installed(kernels=as_json)
    with foreign_code():
        wrong = wrong_results(registry) if as_json else []
    if wrong:
        complain(wrong)
        registry = registry._replace(problems=(*registry.problems, *wrong))
    rows = select(registry.losses, search or (), kind or (), needs or (), framework or (), dialects_of or ())
    if not rows:
        if error := unknown_word(registry.losses, search or ()):
            raise error
        typer.echo("no loss matches; remove a word or an option", err=as_json)
    if as_json:
        answer(json.dumps(as_data(registry, rows), indent=2))
    elif rows:
        (print_tables if verbose else print_lines)(page(), registry, rows)
    if registry.problems:
        raise typer.Exit(1)


def select(
    losses: Sequence[Loss],
    words: Sequence[str] = (),
    kinds: Sequence[str] = (),
    needs: Sequence[str] = (),
    frameworks: Sequence[str] = (),
    dialects_of: Sequence[str] = (),
) -> list[Shown]:
    """Return the losses with all words, inputs and frameworks, and with one of the kinds and upstreams.

    Raises ConfigError for a value that an option does not accept.
    """
    known = {one.name: one for one in running()}
    upstreams = {name for loss in losses for one in loss.dialects for name in (one.upstream, one.framework)}
    inputs = {name for loss in losses for name in (*loss.needs, *loss.optional)}
    given = (
        ("--kind", "kind", kinds, KINDS),
        ("--needs", "input", needs, inputs),
        ("--framework", "framework", frameworks, known),
        ("--dialects-of", "upstream", dialects_of, upstreams),
    )
    for option, noun, values, accepted in given:
        for value in values:
            if value in upstreams and option == "--framework" and value not in known:
                problem = f"there is no adapter for {value!r} yet (there is one for {', '.join(known)})"
                remedy = f"list its dialects: composer-plugins list --dialects-of {value}"
                raise ConfigError(option, problem, remedy)
            if value not in accepted:
                raise unknown(option, value, accepted, noun=noun)
    if not all(map(str.strip, words)):
        raise ConfigError("SEARCH", "an empty word is given", "give a word, or none to list all")
    runners = [known[name] for name in frameworks]
    rows = []
    for loss in losses:
        dialects = [
            one
            for one in loss.dialects
            if (not dialects_of or {one.upstream, one.framework} & {*dialects_of})
            and all({*one.optional} <= runs.provides.get(loss.kind, frozenset()) for runs in runners)
        ]
        if (
            (loss.kind in kinds or not kinds)
            and (dialects or not dialects_of)
            and {*needs} <= {*loss.needs, *loss.optional}
            and all(runs.runs(loss) for runs in runners)
            and all(mentions(loss, word.removeprefix(ARXIV), other_names(loss)) for word in words)
        ):
            rows.append((loss, dialects))
    return rows


def unknown_word(losses: Sequence[Loss], words: Sequence[str]) -> ConfigError | None:
    """The error for the first search word that no loss has, with what it may have meant; None without one."""
    for word in words:
        if not any(mentions(loss, word.removeprefix(ARXIV), other_names(loss)) for loss in losses):
            if part := PARTS.get(spelling(word)):
                return ConfigError("SEARCH", f"{word!r} is not a loss of its own", part)
            if kinds := near(word, KINDS):
                return ConfigError("SEARCH", f"no loss has the word {word!r}", did_you_mean(kinds, "--kind "))
            names = [loss.name for loss in losses] + [d.upstream for loss in losses for d in loss.dialects]
            return unknown("SEARCH", word, names, noun="word", more="composer-plugins list shows all")
    return None


def wrong_results(registry: Registry) -> list[Problem]:
    """A problem for each loss of a plugin that returns something wrong. The tests check our own losses."""
    found = []
    for loss in registry.losses:
        if (origin := registry.origins[loss.kind, loss.name]) != OURS:
            from composer_plugins.cli.worked_example import wrong_result  # loads torch, as the plugin does

            if message := wrong_result(loss):
                found.append(Problem(origin, message, ""))
    return found


def as_data(registry: Registry, rows: Iterable[Shown]) -> dict[str, Any]:
    """The rows as JSON can hold them."""
    return {
        "losses": [row_as_data(registry, loss, dialects) for loss, dialects in rows],
        "problems": [problem._asdict() for problem in registry.problems],
    }


def row_as_data(registry: Registry, loss: Loss, dialects: list[Dialect]) -> dict[str, Any]:
    """A row and some of its dialects as JSON can hold them."""
    return {
        **{name: getattr(loss, name) for name in OF_A_LOSS},
        "kernel": loss.path,
        "distribution": registry.origins.get((loss.kind, loss.name), IMPORT_PATH),
        "frameworks": [one.name for one in running() if one.runs(loss)],
        "parameters": {n: _parameter(p, loss.defaults[n]) for n, p in loss.parameters.items()},
        "dialects": [
            {"name": f"{loss.name}@{d.upstream}"} | {name: getattr(d, name) for name in OF_A_DIALECT}
            for d in dialects
        ],
    }


def print_lines(console: Console, registry: Registry, rows: list[Shown]) -> None:
    """A line to each loss, by kind: its name, a letter for each framework that runs it, and what it is."""
    letters = letters_of([one.name for one in running()])
    if any(loss.kind in one.provides for loss, _ in rows for one in running()):
        legend = ", ".join(f"{letter} {name}" for name, letter in letters.items())
        console.print(f"runs in: {legend}; . not there\n")
    for kind, words in KINDS.items():
        of_kind = [loss for loss, _ in rows if loss.kind == kind]
        hosts = [one for one in running() if kind in one.provides]
        cells = []
        for loss in of_kind:
            marks = "".join(letters[one.name] if one.runs(loss) else "." for one in hosts)
            name, what = Text(loss.name, style="cyan"), Text(_what(registry, loss))
            cells.append((name, Text(marks), what) if hosts else (name, what))
        if cells:
            heading = _number(len(cells), words.singular, words.plural)
            console.print(Text(heading, style="bold"), table(cells, indent=2), "", sep="\n")
    console.print(
        "-v shows the papers, proofs and dialects, and composer-plugins explain NAME all of one loss."
    )


def letters_of(names: Iterable[str]) -> dict[str, str]:
    """A letter for each name: its first one that no other name has already."""
    found = dict[str, str]()
    for name in names:
        left = [one for one in name + string.ascii_letters if one.isalpha() and one not in found.values()]
        found[name] = left[0]
    return found


def print_tables(console: Console, registry: Registry, rows: list[Shown]) -> None:
    """A table to each kind: each loss with its source and its proof, its dialects below it."""
    for kind, names in KINDS.items():
        cells = [cell for row in rows if row[0].kind == kind for cell in _cells(registry, *row)]
        if cells:
            console.print(Text(names.plural, style="bold"))
            console.print(table(cells))
            console.print()
    console.print(count(rows))


def _cells(registry: Registry, loss: Loss, dialects: list[Dialect]) -> Iterator[tuple[Text, Text]]:
    yield Text(loss.name, style="cyan"), _text(_what(registry, loss), loss.paper, loss.proof)
    for d in dialects:
        yield Text(f"  @{d.upstream}"), _text(changes(d) or "as the paper", d.source, d.proof)


def _what(registry: Registry, loss: Loss) -> str:
    origin = registry.origins[loss.kind, loss.name]
    return loss.summary if origin == OURS else f"{loss.summary} [plugin: {origin}]"


def _text(what: str, source: str, proof: str) -> Text:
    return Text(what).append("".join(f"\n{line}" for line in (source, proof) if line), style="dim")


def count(rows: list[Shown]) -> str:
    """How many of each kind, in a sentence."""
    numbers = {kind: sum(loss.kind == kind for loss, _ in rows) for kind in KINDS}
    parts = [_number(n, KINDS[kind].singular, KINDS[kind].plural) for kind, n in numbers.items() if n]
    dialects = _number(sum(len(dialects) for _, dialects in rows), "a dialect", "dialects")
    return ", ".join([*parts, dialects])


def _number(n: int, one: str, many: str) -> str:
    return f"1 {one.partition(' ')[2]}" if n == 1 else f"{n} {many}"


def changes(dialect: Dialect) -> str:
    """The parameters that a dialect sets, and the inputs that it takes."""
    values = [f"{name}={value}" for name, value in {**dialect.params, **dialect.denominators}.items()]
    return ", ".join([*values, *(f"with {name}" for name in dialect.optional)])


def _parameter(parameter: Parameter, default: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"help": parameter.help}
    shown |= {"required": True} if default is REQUIRED else {"default": default}
    if parameter.choices:
        return {**shown, "choices": list(parameter.choices)}
    if parameter.low != -math.inf:
        shown |= {"low": 0, "low_open": True} if parameter.low_open else {"low": parameter.low}
    return shown if parameter.high == math.inf else {**shown, "high": parameter.high}
