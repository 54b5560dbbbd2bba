"""The pages of the losses: an index, and one page each, made from the catalogue and the kernels."""

import inspect
import json
from pathlib import Path

from composer_plugins.cli.explaining import AVERAGES
from composer_plugins.frameworks.registry import called, running
from composer_plugins.frameworks.trl import LOSS_OPTIONS
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import GRADIENTS, KINDS, Dialect, Loss
from docs.generator import differences, examples, formulas, plots, usage
from docs.generator.markdown import paper, plain, proof, table
from docs.generator.tex import tex
from docs.generator.written import ROOT

UP = "../../"  # from a page of a loss to the repository
INTRODUCTION = """# The losses

Each name is the loss of its paper. A name with a framework after an @, such as `cispo@trl`, is a *dialect*:
the parameters with which the loss computes what that framework computes. A ✓ says that the adapter of the
framework can train with the loss by name. The others are called as functions. [Which loss is this?](names.md)
finds a loss by the name that a framework gives it.

What divides the sum of a policy loss over tokens is on [the page on denominators](../docs/denominators.md).
"""
SYMBOLS = (
    ("y_t", "the token at position t of a completion y"),
    (r"\pi", "the probability of a token under the policy in training"),
    (r"\pi_\mathrm{old}", "the same under the policy before this round of updates"),
    (r"\mu", "the same under the engine that sampled"),
    (r"\pi_\mathrm{ref}", "the same under the reference policy"),
    (r"r_t", "the ratio of two of these probabilities at a token; each page says which"),
    (r"A", "the advantage"),
    (r"\mathrm{sg}", "a number without a gradient (stop-gradient, `detach`)"),
    (r"\mathbb{1}[\ldots]", "1 where the condition holds, 0 elsewhere"),
    (r"x_t,\ \ell", "the loss of a token; of a pair of completions, or of one"),
    (r"y^+,\ y^-", "the chosen and the rejected completion of a pair"),
    (r"R_i,\ \overline{R}_g", "the reward of a completion, and the mean over the completions of its prompt"),
    (r"\sigma", "the logistic function, 1 / (1 + exp(-x)); in an advantage, a standard deviation"),
    (r"S,\ T", "the distributions of a student and of a teacher over the vocabulary"),
)  # fmt: skip


def pages() -> dict[str, str]:
    """The Markdown of the index and of each loss, by file."""
    return {"losses/index.md": _index()} | {file_of(loss): _page(loss) for loss in registry().losses}


def navigation() -> list[dict[str, list[dict[str, str]]]]:
    """The losses as sections of mkdocs' navigation, one for each kind."""
    sections = []
    for kind, words in KINDS.items():
        entries = [{loss.name: file_of(loss)} for loss in registry().losses if loss.kind == kind]
        sections.append({words.plural[0].upper() + words.plural[1:]: entries})
    return sections


def file_of(loss: Loss) -> str:
    """The file of a loss's page in the site's sources."""
    return f"losses/{loss.kind}/{loss.name}.md"


def runs_in(loss: Loss) -> str:
    """The frameworks whose adapter can run the loss."""
    return ", ".join(one.title for one in running() if one.runs(loss))


def _index() -> str:
    parts = [INTRODUCTION]
    for kind, words in KINDS.items():
        found = [loss for loss in registry().losses if loss.kind == kind]
        where = [one for one in running() if any(map(one.runs, found))]
        rows = [
            (
                f"[`{loss.name}`]({kind}/{loss.name}.md)<br>{plain(loss.summary)}",
                paper(loss.paper),
                *("✓" if one.runs(loss) else "" for one in where),
            )
            for loss in found
        ]
        title = words.plural[0].upper() + words.plural[1:]
        made = table(("loss", "paper", *(one.title.partition(" and ")[0] for one in where)), rows)
        parts.append(f'## {title}\n\n<div class="ticks" markdown>\n\n{made}\n</div>\n')
    symbols = [(formulas.inline(symbol), meaning) for symbol, meaning in SYMBOLS]
    parts.append("## Symbols\n\n" + table(("symbol", "meaning"), symbols))
    return "\n".join(parts)


def _page(loss: Loss) -> str:
    kind = KINDS[loss.kind].singular
    tags = [*(f"{loss.name}@{dialect.upstream}" for dialect in loss.dialects), *loss.parameters]
    parts = [
        f"---\ntags: {json.dumps(tags)}\n---\n\n# {loss.name}",
        f"{kind[0].upper()}{kind[1:]}: {plain(loss.summary)}.",
        formulas.block(tex(loss)),
        plots.section(loss),
        _facts(loss),
        usage.section(loss),
        _parameters(loss),
        _dialects(loss),
        "## On a small example\n\n" + examples.tables(loss),
        "## What it takes\n\n" + _inputs(loss),
        "## From its docstring\n\n" + _docstring(loss),
        differences.section(loss, UP),
        _source(loss),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(loss: Loss) -> str:
    mode = f"[`{loss.mode}`](../aggregation/{loss.mode}.md) ([what that means]({UP}docs/denominators.md))"
    facts = {
        "paper": paper(loss.paper),
        "runs in": runs_in(loss) or "no adapter: call the function",
        "denominator": mode if loss.mode else "",
        "gradient": plain(GRADIENTS[loss.gradient]),
        "batch": "a statistic of the whole batch: micro-batches change it" if loss.over_batch else "",
        "advantages": "one per sequence: it averages those that differ by token" if loss.per_sequence else "",
        "scores": AVERAGES[True] if loss.average else "",
        "proof": proof(loss.proof, UP),
    }
    return table(("", ""), [(f"**{label}**", text) for label, text in facts.items() if text])


def _parameters(loss: Loss) -> str:
    if not loss.parameters:
        return ""
    rows, names = [], called(loss)
    for name, parameter in loss.parameters.items():
        domain = ", ".join(f"`{one}`" for one in parameter.choices) or parameter.interval
        also = ", ".join(f"`{one}`" for one in names.get(name, ()))
        rows.append((f"`{name}`", plain(parameter.help), f"`{loss.defaults[name]}`", domain, also))
    head = ("name", "meaning", "default", "range", "names in other code")
    return f"## Parameters\n\n{names_of_trl(loss)}\n\n" + table(head, rows)


def names_of_trl(loss: Loss) -> str:
    """Which names of the table's last column a config of TRL takes for this loss."""
    text = "Set a parameter by the name in the first column. The last column is for reading other code."
    if loss.kind != "policy" or "TRL" not in runs_in(loss):
        return text
    names = [name for name, option in LOSS_OPTIONS.items() for one in option.sets if loss.name in one.losses]
    taken = ", ".join(f"`{name}`" for name in dict.fromkeys(names)) or "none"
    link = f"[Options of TRL]({UP}docs/trl_options.md#options-of-trl)"
    return f"{text} Options of TRL that set a parameter of this loss: {taken} ({link})."


def _dialects(loss: Loss) -> str:
    if not loss.dialects:
        return ""
    parts = ["## Dialects"]
    if loss.parameters:
        rows = [("paper", *(loss.defaults[name] for name in loss.parameters))]
        rows += [
            (f"`@{d.upstream}`", *(_value(name, loss, d) for name in loss.parameters)) for d in loss.dialects
        ]
        parts.append(table(("", *(f"`{name}`" for name in loss.parameters)), rows))
    for d in loss.dialects:
        lines = [f"### {loss.name}@{d.upstream}", f"- **Where:** {plain(d.source)}"]
        lines += [f"- **Denominator there:** `{d.mode}`"] if d.mode else []
        if d.average not in (None, loss.average):
            lines += [f"- **Scores there:** {AVERAGES[d.average]}"]
        lines += [f"- **Note:** {plain(d.note)}"] if d.note else []
        lines += [f"- **Proof:** {proof(d.proof, UP)}"]
        parts.append(lines[0] + "\n\n" + "\n".join(lines[1:]))
    return "\n\n".join(parts)


def _value(name: str, loss: Loss, dialect: Dialect) -> str:
    values = {**dialect.params, **dialect.denominators}
    return f"**{values[name]}**" if name in values else f"{loss.defaults[name]}"


def _inputs(loss: Loss) -> str:
    rows = [(f"`{name}`", f"`{INPUTS[name].shape}`", plain(INPUTS[name].help)) for name in loss.needs]
    rows += [
        (f"`{name}`", f"`{INPUTS[name].shape}`", f"optional: {plain(INPUTS[name].help)}")
        for name in loss.optional
    ]
    return table(("input", "shape", "meaning"), rows)


def _docstring(loss: Loss) -> str:
    """The docstring; its formulas, which are indented, stay as they are."""
    text = inspect.getdoc(loss.kernel()) or ""
    blocks = text.split("\n\n")
    return "\n\n".join(one if one.startswith("    ") else plain(one) for one in blocks)


def _source(loss: Loss) -> str:
    kernel = getattr(loss.kernel(), "func", loss.kernel())  # of a preset, the function that it calls
    file = Path(inspect.getsourcefile(kernel) or "").resolve().relative_to(ROOT).as_posix()
    lines, first = inspect.getsourcelines(kernel)
    code = "    ".join(["", *lines]).rstrip()
    head = f'??? note "Source of the function"\n\n    [`{file}`]({UP}{file}#line-{first})\n\n'
    return f"{head}    ```python\n{code}\n    ```"
