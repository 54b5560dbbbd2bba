"""`composer-plugins teacher`: what a teacher makes of its hints, measured before training."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from composer_plugins.cli.console import answer, foreign_code, page, table
from composer_plugins.cli.doctor import print_finding
from composer_plugins.errors import ConfigError, with_place

if TYPE_CHECKING:
    from composer_plugins.teacher import Advice, Measured, Subject

# The measurements by their heading, with the number of decimals.
HEADINGS = {
    "greedy": "reward, greedy",
    "sampled": "reward, sampled",
    "shown": "hint shown",
    "forward_kl": "KL(T||S)",
    "reverse_kl": "KL(S||T)",
    "ordered": "ordered",
    "leaks": "leaks",
}
EXPLAINED = (
    "KL: nats per token of the policy's own completions, between the teacher T and the policy S. ordered: "
    "how often the teacher likes the better of two completions of a prompt more. leaks: completions of the "
    "teacher that repeat the wording of the hints."
)


def teacher(
    model: Annotated[
        str | None, typer.Option(help="A folder with a model and its tokenizer, or a name on the hub.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows with the columns prompt and privileged_context, and what the reward reads: a file "
            "(.jsonl .json .parquet .csv), or a data set's name on the hub."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="The reward function, module:function, which is called as TRL calls it."),
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="module:make_trainer in the place of these three: a function that returns a GRPOTrainer, "
            "whose model, data, rewards, chat template and sampling are used."
        ),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help="A teacher_prompt_template, in which \\n is a line break, or the name of one of our "
            "templates. May be repeated. Default: all of our templates, with --trainer the trainer's own too."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows are drawn.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="How many completions of each are sampled.")] = 4,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The length of a completion. Default: 256, or the trainer's.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Of sampling. Default: 1, or the trainer's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a forward pass.")] = 16,
    device: Annotated[str, typer.Option(help="Where --model runs.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the rows and of the sampling.")] = 0,
    control: Annotated[
        bool, typer.Option("--control", help="Measure wrong hints and unrelated solved examples too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Measure what the hint channel's teacher makes of its hints, before training.

    For each template: how often the teacher is right, how far it is from the policy, whether it sees the
    whole hint, and whether its completions give the hint away. The last lines name the template to use.

    Exit status 1: no template has a teacher that is better than the policy; 2: something could not be loaded.
    """
    with foreign_code():
        import torch

        from composer_plugins.teacher import advice, measure, named_templates

        given = {"max_new_tokens": max_new_tokens, "temperature": temperature}
        options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        options |= {"rows": rows, "seed": seed, "samples": samples, "batch_size": batch_size}
        subject, own = _subject(model, data, reward, trainer, device, options)
        templates = named_templates(template or (), "--template")
        if own and not template:
            templates = {"trainer's own": own, **{k: t for k, t in templates.items() if t != own}}
        torch.manual_seed(seed)
        with Console(stderr=True).status("measuring the policy and its teachers"):
            found = [*measure(subject, templates, control=control, seed=seed)]
        advised = advice(found)
    if as_json:
        answer(json.dumps(_as_data(found, advised), indent=2))
    else:
        _print(page(), found, advised)
    if advised.best is None:
        raise typer.Exit(1)


def _subject(
    model: str | None,
    data: str | None,
    reward: str | None,
    trainer: str | None,
    device: str,
    options: dict[str, Any],
) -> "tuple[Subject, str]":
    """What is measured, and the template of its trainer."""
    from composer_plugins.losses.derived import function_of_import_path
    from composer_plugins.teacher import Subject

    if trainer is not None:
        if model or data or reward:
            problem = "it has a model, data and rewards of its own"
            raise ConfigError("--trainer", problem, "remove --model, --data and --reward")
        make = function_of_import_path(trainer, "--trainer")
        try:
            made = make()
        except Exception as error:
            problem = f"{trainer} cannot make its trainer: {with_place(error)}"
            raise ConfigError("--trainer", problem, "return a GRPOTrainer that trains") from error
        return Subject.of_trainer(made, **options), getattr(made.args, "teacher_prompt_template", "")
    for name, value in {"--model": model, "--data": data, "--reward": reward}.items():
        if value is None:
            raise ConfigError(name, "it is missing", "give --model, --data and --reward, or --trainer")
    assert model and data and reward
    return Subject.of_files(model, data, reward, device=device, **options), ""


def _print(console: Console, found: "list[Measured]", advised: "Advice") -> None:
    numbers = [[f"{getattr(one, key):.3f}".replace("nan", "-") for key in HEADINGS] for one in found]
    rows = [(one.name or "policy, no hint", *of) for one, of in zip(found, numbers, strict=True)]
    console.print(table(rows, ("template", *HEADINGS.values()), right=[*HEADINGS.values()]))
    console.print(Text(EXPLAINED, style="dim"))
    for finding in advised.findings:
        print_finding(console, finding)
    best = advised.best
    if best is None:
        console.print(Text("None of these templates makes a teacher that is better than the policy.", "red"))
        return
    console.print(
        Text(
            f"Use {best.name}: its teacher's sampled completions earn {best.sampled:.3f}, the policy's own "
            f"{found[0].sampled:.3f}, and no other such teacher is nearer to the policy.",
            "bold",
        )
    )
    console.print(Text(f"teacher_prompt_template = {json.dumps(best.template)}"), soft_wrap=True)


def _as_data(found: "list[Measured]", advised: "Advice") -> dict[str, Any]:
    """What `--json` prints; a number that is not known is null."""
    rows = [{k: None if v != v else v for k, v in one._asdict().items()} for one in found]
    return {
        "measured": rows,
        "findings": [finding._asdict() for finding in advised.findings],
        "best": advised.best and advised.best.name,
    }
