"""The commands states, replay, pairs and clean. Every step leaves a file that a person can read."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.recipes.shared import HELP_OPTIONS, INTERRUPTED, check_installed, cut, make_folder
from composer_plugins.recipes.trace_replay.formats import log_files, read_logs, read_tools
from composer_plugins.recipes.trace_replay.formats.common import Acted, Tally
from composer_plugins.recipes.trace_replay.journal import FILE, Journal
from composer_plugins.recipes.trace_replay.states import (
    State,
    read_states,
    state_id,
    write_states,
    write_text,
)

STATES, RUN = "states.jsonl", "run.json"

app = typer.Typer(
    name="trace_replay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)
console = Console(highlight=False, markup=False, emoji=False)


class Redact(StrEnum):
    """What is replaced before states are written."""

    SECRETS = "secrets"
    NOTHING = "nothing"


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the command `states`.")]


@app.callback()
def before_every_command() -> None:
    """From an agent's logs to preference pairs, by asking several teachers again at each state."""
    check_installed("trace_replay", ("openai", "httpx2", "pyarrow", "detect_secrets"), "trace-replay")


@app.command("states")
def make_states(
    logs: Annotated[
        list[Path], typer.Argument(help="Log files, or folders that are searched for *.jsonl files.")
    ],
    redact: Annotated[
        Redact, typer.Option(help="secrets: replace secrets; nothing: write the logs as they are.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of this run.")] = Path("replay"),
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with OpenAI function tools, for logs that have none.")
    ] = None,
) -> None:
    """Write every point at which the model acted to DIR/states.jsonl."""
    files = [one for one in log_files(logs) if out.resolve() not in one[0].parents]
    tally = Tally()
    actions = list(read_logs(files, read_tools(tools) if tools is not None else None, tally))
    counts = {"not used, or left out": tally.actions + tally.lines}
    if not actions:
        print_counts(counts)
        problem = f"no action of a model is in {len(files)} file(s)"
        raise DataError("LOGS", problem, "give logs in which a model acted after a message")
    if redact is Redact.SECRETS:
        from composer_plugins.recipes.trace_replay.redact import redacted

        actions, counts["different secrets that were replaced"] = redacted(actions)
    unique = dict[tuple[str, str], Acted]()
    for acted in actions:
        unique.setdefault((state_id(acted.messages, acted.tools), acted.key), acted)
    if copies := len(actions) - len(unique):
        counts["not used, or left out"]["it is in another file too"] = copies
    states = [State(identity, *acted[:-1]) for (identity, _), acted in unique.items()]
    make_folder("--out", out)
    write_states(states, out / STATES)
    write_text(out / RUN, json.dumps({"redact": redact, "counts": counts}, indent=1) + "\n")
    console.print(f"{len(states)} state{'s' * (len(states) != 1)} in {out / STATES}", soft_wrap=True)
    for label, why in tally.skipped.items():
        warn(f"skipped: {label} ({why})")
    print_counts(counts)
    if number := sum(state.tools is None for state in states):
        warn(f"states without tools: {number}; a teacher can call none there, and --tools names a file")


def _read_folder(folder: Path) -> tuple[dict[str, Any], list[State]]:
    """What the command `states` has written."""
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{folder / RUN} cannot be read ({in_a_line(error)})"
        raise ConfigError("DIR", problem, "name a folder that the command `states` has written") from None
    return run, read_states(folder / STATES)


@app.command("replay")
def replay_command(
    folder: Folder,
    teachers: Annotated[Path, typer.Option(help="YAML file with the teachers.")],
    max_usd: Annotated[float, typer.Option(min=0, help="The most that all replays of this folder may cost.")],
    samples: Annotated[int, typer.Option(min=1, help="Answers of each teacher to each state.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 8,
) -> None:
    """Ask every teacher at every state, and keep the answers in DIR/answers.jsonl."""
    from composer_plugins.recipes.trace_replay.teachers import load_teachers

    loaded = load_teachers(teachers)
    for one in (one for one in loaded if one.prices is not None):
        line = f"{one.name}: at most {one.usd_per_million_input:g} USD per million tokens of input, and "
        line += f"{one.usd_per_million_output:g} of output"
        line += f"; {one.usd_per_request:g} per request" * (one.usd_per_request > 0)
        console.print(line, soft_wrap=True)
    ask(folder, loaded, max_usd, samples, concurrency)


def ask(folder: Path, teachers: list[Any], max_usd: float, samples: int, concurrency: int) -> None:
    """Replay with a progress bar; Ctrl-C keeps every answer that has arrived."""
    from composer_plugins.recipes.trace_replay import replay

    _, states = _read_folder(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with (
            _journal(folder) as answers,
            Progress(*columns, console=console, disable=not console.is_terminal) as bar,
        ):
            task = bar.add_task("asking", total=None)

            def show(done: replay.Summary) -> None:
                text = f"{done.failed} failed, {done.spent_usd:.4f} of {max_usd:g} USD"
                bar.update(task, total=done.total, completed=done.done, description=text)

            options: dict[str, Any] = {"samples": samples, "concurrency": concurrency, "max_usd": max_usd}
            running = replay.replay(states, teachers, answers, **options, on_progress=show)
            summary = asyncio.run(running)
    except KeyboardInterrupt:
        console.print("interrupted: the answers that have arrived are kept; run the same command to go on")
        raise typer.Exit(INTERRUPTED) from None
    console.print(
        f"{summary.answered} new answers, {summary.answered_before} from before; {summary.failed} failed, "
        f"{summary.over_budget} did not fit the budget; spent {summary.spent_usd:.6f} USD in all",
        soft_wrap=True,
    )
    if summary.failed:
        warn(f"the first failure: {summary.first_failure}")
    if summary.over_budget:
        enough = math.ceil((summary.spent_usd + summary.rest_usd) * 1e6 + 1e-6) / 1e6
        warn(f"set --max-usd {enough:.6f} to send the requests that did not fit the budget")
    if summary.without_usage:
        text = f"answers whose usage is missing or not valid: {summary.without_usage}"
        warn(f"{text}; each counts with the most that it can cost")
    if summary.above_reserved:
        text = f"requests that cost more than was reserved for them: {summary.above_reserved}"
        warn(f"{text}; correct the prices in --teachers, or remove params that cost more")
    if summary.failed or summary.over_budget:
        raise typer.Exit(1)


def _journal(folder: Path) -> Journal:
    journal = Journal(folder / FILE)
    if journal.has_half_line:
        warn(f"the last line of {folder / FILE} was written in part and is cut off: it is asked for again")
    return journal


@app.command("pairs")
def make_pairs(
    folder: Folder,
    min_agree: Annotated[int, typer.Option(min=2, help="How many teachers must agree.")] = 2,
    ignore: Annotated[
        list[str] | None, typer.Option(help="An argument that is not part of an action: Bash.description.")
    ] = None,
) -> None:
    """Write the pairs to DIR/pairs.parquet, with a data card, DIR/README.md."""
    from composer_plugins.recipes.trace_replay import pairs, report

    run, states = _read_folder(folder)
    ignored = pairs.ignored_arguments(ignore or [], states)
    answers, counts = list[Any](), dict[str, Mapping[str, int]](run["counts"])
    if (folder / FILE).exists():
        with _journal(folder) as journal:
            answers = journal.answers()
            counts["answers by teacher"] = Counter(answer.teacher for answer in answers)
            counts["requests without an answer"] = Counter(cut(one, 80) for one in journal.failures())
    elif all(state.outcome is None for state in states):  # outcomes make pairs without teachers
        raise ConfigError(str(folder / FILE), "there is no journal", "run the command `replay` first")
    found, made = pairs.make_pairs(states, answers, min_agree=min_agree, ignored=ignored)
    own = {"answers": made.answers, "actions of the traces": made.actions}
    if found:
        report.write_pairs(found, folder / report.PAIRS)
        card = report.card(found, is_redacted=run["redact"] == Redact.SECRETS, counts=counts | own)
        write_text(folder / report.CARD, card)
        console.print(f"{len(found)} pairs in {folder / report.PAIRS}", soft_wrap=True)
    print_counts(own)
    if not found:
        console.print(f"no pair was made, and {folder / report.PAIRS} is not written", soft_wrap=True)
        raise typer.Exit(1)


@app.command("clean")
def clean_rows(
    pairs: Annotated[Path, typer.Argument(help="DIR/pairs.parquet, or DIR/states.jsonl.")],
    recipe: Annotated[Path, typer.Option(help="YAML file of data-juicer with operators, as clean.yaml.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: DIR/pairs_clean.parquet.")
    ] = None,
) -> None:
    """Write the rows that all operators of a data-juicer recipe keep, and what each of them dropped."""
    check_installed("clean", ("data_juicer", "aiohttp", "ray"), "data-juicer")
    from composer_plugins.recipes.trace_replay.clean import clean

    out = out or pairs.parent / f"{pairs.stem}_clean{pairs.suffix}"
    report = clean(pairs, recipe, out)
    for line in report["warnings"]:
        warn(f"data-juicer: {cut(line, 200)}")
    if report["left"]:
        console.print(f"{report['left']} of {report['rows']} rows in {out}", soft_wrap=True)
    table = Table("operator", "parameters", "dropped", box=SIMPLE_HEAD)
    for one in report["operators"]:
        shown = ", ".join(f"{name}={value}" for name, value in one["parameters"].items())
        table.add_row(one["operator"], shown, str(len(one["dropped rows"])))
    console.print(table)
    if not report["left"]:
        console.print(f"no row is left, and {out} is not written", soft_wrap=True)
        raise typer.Exit(1)


def warn(text: str) -> None:
    """Print a sentence that a person should not miss."""
    console.print(Text(text, style="yellow"), soft_wrap=True)


def print_counts(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Print each title with its counts that are not 0, the highest first."""
    for title, of_title in counts.items():
        if rows := (+Counter(of_title)).most_common():
            console.print(f"{title}:", *(f"{number:>6}  {name}" for name, number in rows), sep="\n")
