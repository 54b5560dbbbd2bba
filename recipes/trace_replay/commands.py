"""The command line: states, replay, pairs and demo. Every step leaves a file that a person can read."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from composer_plugins.errors import ConfigError, DataError, in_a_line, unknown
from composer_plugins.recipes.shared import INTERRUPTED, cut, make_folder
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
SECRETS, NOTHING = "secrets", "nothing"

app = typer.Typer(
    name="trace_replay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(highlight=False, markup=False, emoji=False)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the command `states`.")]


@app.command("states")
def make_states(
    logs: Annotated[
        list[Path] | None, typer.Argument(help="Log files, or folders that are searched for *.jsonl files.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of this run.")] = Path("replay"),
    redact: Annotated[
        str, typer.Option(help="secrets: replace secrets; nothing: write the logs as they are. No default.")
    ] = "",
    tools: Annotated[
        Path | None, typer.Option(help="JSON file with OpenAI function tools, for logs that have none.")
    ] = None,
) -> None:
    """Write every point at which the model acted to DIR/states.jsonl."""
    if not redact:
        problem = "it is not decided whether secrets are replaced, and states are sent to teachers"
        raise ConfigError("--redact", problem, f"set --redact {SECRETS}, or --redact {NOTHING}")
    if redact not in (SECRETS, NOTHING):
        raise unknown("--redact", redact, (SECRETS, NOTHING), noun="choice", guess=False)
    if not logs:
        raise ConfigError("LOGS", "no log is given", "name log files, or folders with *.jsonl files")
    files = [one for one in log_files(logs) if out.resolve() not in one[0].parents]
    known_tools = read_tools(tools) if tools is not None else None
    run: dict[str, Any] = {"logs": sorted(map(str, logs)), "redact": redact}
    run["tools"] = "those of the logs" if tools is None else f"those of the logs, else of {tools}"
    _check_folder(out, run)
    tally = Tally()
    actions = list(read_logs(files, known_tools, tally))
    if not actions:
        counted = tally.actions + tally.lines
        reasons = ", ".join(f"{reason}: {number}" for reason, number in counted.most_common())
        problem = f"no action of a model is in {len(files)} file(s){f' ({reasons})' if reasons else ''}"
        raise DataError("LOGS", problem, "give logs in which a model acted after a message")
    secrets = Counter[str]()
    if redact == SECRETS:
        from composer_plugins.recipes.trace_replay.redact import redacted

        actions, secrets = redacted(actions)
    unique = dict[tuple[str, str], Acted]()
    for acted in actions:
        unique.setdefault((state_id(acted.messages, acted.tools), acted.key), acted)
    if copies := len(actions) - len(unique):
        tally.actions["it is in another file too"] = copies
    states = [State(identity, *acted[:-1]) for (identity, _), acted in unique.items()]
    run |= {"states": len(states), "states_without_tools": sum(one.tools is None for one in states)}
    run |= {"lines": dict(tally.lines), "actions": dict(tally.actions), "secrets": dict(secrets)}
    run |= {"skipped": tally.skipped}
    write_states(states, out / STATES)
    write_text(out / RUN, json.dumps(run, indent=1) + "\n")
    console.print(f"{len(states)} state{'s' * (len(states) != 1)} in {out / STATES}", soft_wrap=True)
    for label, why in tally.skipped.items():
        console.print(Text(f"skipped: {label} ({why})", style="yellow"), soft_wrap=True)
    _print_counts("not used, or left out", {**tally.actions, **tally.lines})
    _print_counts("different secrets, replaced everywhere", secrets)
    if run["states_without_tools"]:
        number = run["states_without_tools"]
        have = " has" if number == 1 else "s have"
        text = f"{number} state{have} no tools, so that a teacher can call none there; --tools names a file"
        console.print(Text(text, style="yellow"), soft_wrap=True)


def _check_folder(out: Path, run: dict[str, Any]) -> None:
    """Raise ConfigError unless files can be written to the folder, and it has no other run's."""
    make_folder("--out", out)
    if (out / RUN).exists() or (out / STATES).exists():
        before = _read_run(out)
        changed = [name for name, value in run.items() if before.get(name) != value]
        if changed == ["tools"] and not (out / FILE).exists():
            return  # nothing was asked yet: the states are written anew
        if changed:
            problem = f"{out} has the states of a run with other {', '.join(changed)}"
            raise ConfigError("--out", problem, "name another folder")


def _read_run(folder: Path) -> dict[str, Any]:
    """What the command `states` has recorded."""
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{folder / RUN} cannot be read ({in_a_line(error)})"
        raise ConfigError("DIR", problem, "name a folder that the command `states` has written") from None
    if not isinstance(run, dict) or "states" not in run:
        problem = f"{folder / RUN} was not written by the command `states`"
        raise ConfigError("DIR", problem, "name a folder that the command `states` has written")
    return run


def _read_folder(folder: Path) -> tuple[dict[str, Any], list[State]]:
    run, states = _read_run(folder), read_states(folder / STATES)
    if not states:
        raise ConfigError("DIR", f"{folder / STATES} has no states", "run the command `states` again")
    return run, states


@app.command("replay")
def replay_command(
    folder: Folder,
    teachers: Annotated[Path, typer.Option(help="YAML file with the teachers.")],
    max_usd: Annotated[float, typer.Option(help="The most that all replays of this folder may cost.")],
    samples: Annotated[int, typer.Option(help="Answers of each teacher to each state.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Requests at the same time.")] = 8,
) -> None:
    """Ask every teacher at every state, and keep the answers in DIR/answers.jsonl."""
    from composer_plugins.recipes.trace_replay.teachers import load_teachers

    ask(folder, load_teachers(teachers), max_usd, samples, concurrency)


def ask(folder: Path, teachers: list[Any], max_usd: float, samples: int, concurrency: int) -> None:
    """Replay with a progress bar; Ctrl-C keeps every answer that has arrived."""
    from composer_plugins.recipes.trace_replay import replay

    replay.check_options(teachers, samples=samples, concurrency=concurrency, max_usd=max_usd)
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

            summary = asyncio.run(
                replay.replay(
                    states,
                    teachers,
                    answers,
                    samples=samples,
                    concurrency=concurrency,
                    max_usd=max_usd,
                    on_progress=show,
                )
            )
    except KeyboardInterrupt:
        console.print("interrupted: the answers that have arrived are kept; run the same command to go on")
        raise typer.Exit(INTERRUPTED) from None
    console.print(
        f"{summary.answered} new answers, {summary.answered_before} from before; {summary.failed} failed, "
        f"{summary.over_budget} did not fit the budget; spent {summary.spent_usd:.6f} USD in all",
        soft_wrap=True,
    )
    for remark in summary.remarks():
        console.print(Text(remark, style="yellow"), soft_wrap=True)
    if summary.failed or summary.over_budget:
        raise typer.Exit(1)


def _journal(folder: Path, *, create: bool = True) -> Journal:
    journal = Journal(folder / FILE, create=create)
    if journal.has_half_line:
        text = f"the last line of {folder / FILE} was written in part and is cut off: it is asked for again"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    return journal


@app.command("pairs")
def make_pairs(
    folder: Folder,
    judge: Annotated[
        str | None, typer.Option(help="Function that groups texts, as package.module:function.")
    ] = None,
    min_agree: Annotated[int, typer.Option(help="How many teachers must agree, at least 2.")] = 2,
    ignore: Annotated[
        list[str] | None, typer.Option(help="An argument that is not part of an action: Bash.description.")
    ] = None,
) -> None:
    """Write the pairs to DIR/pairs.parquet, and what became of every state to DIR/report.md."""
    from composer_plugins.recipes.trace_replay import logprobs, pairs, report

    group = pairs.find_judge(judge) if judge else None
    run, states = _read_folder(folder)
    ignored = pairs.ignored_arguments(ignore or [], states)
    answers, scores, costs = list[Any](), list[Any](), report.Costs()
    by_outcome = any(state.outcome is not None for state in states)  # which needs no teacher
    if (folder / FILE).exists() or not by_outcome:
        with _journal(folder, create=False) as journal:
            answers, scores = list(journal.answers()), list(journal.scores())
            failures = Counter(cut(reason, 80) for reason in journal.failures())
            by_teacher = Counter(dict.fromkeys(journal.teachers(), 0))
            by_teacher.update(answer.teacher for answer in answers)
            costs = report.Costs(journal.spent, by_teacher, failures)
    known = {state.id for state in states}
    if answers and not any(answer.state in known for answer in answers):
        problem = f"no answer in {folder / FILE} belongs to a state in {folder / STATES}"
        raise ConfigError("DIR", problem, "name a folder whose states were replayed")
    found, counts = pairs.make_pairs(states, answers, min_agree=min_agree, judge=group, ignored=ignored)
    counts.answers["to a state that is not in states.jsonl"] += sum(a.state not in known for a in answers)
    settings = {"judge": judge, "min_agree": min_agree, "ignored": ", ".join(ignore or [])}
    if found:
        report.write_pairs(found, folder / report.PAIRS)
    if scores:
        number = logprobs.write_scores(scores, states, folder / logprobs.SCORES)
        console.print(f"{number} scored actions in {folder / logprobs.SCORES}", soft_wrap=True)
    write_text(folder / report.REPORT, report.report({**run, **settings}, counts, found, costs))
    if found:
        write_text(folder / report.CARD, report.card(run, found, costs))
        console.print(f"{len(found)} pairs in {folder / report.PAIRS}", soft_wrap=True)
    _print_counts("actions of the traces", counts.states)
    if not found:
        kept = f"; {folder / report.PAIRS} is of an earlier run, and is kept"
        kept = kept if (folder / report.PAIRS).exists() else ""
        text = f"no pair was made, and no parquet file is written; {folder / report.REPORT} says why{kept}"
        console.print(text, soft_wrap=True)
        raise typer.Exit(1)


def _print_counts(title: str, counts: Mapping[str, int]) -> None:
    if shown := sorted(((-number, name) for name, number in counts.items() if number)):
        console.print(f"{title}:", *(f"{-number:>6}  {name}" for number, name in shown), sep="\n")
