"""Which loss is this: the names that frameworks give to losses and parameters, and ours."""

import re
from collections.abc import Iterator

from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import frameworks, other_names
from composer_plugins.losses.choosing import PARTS
from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import KINDS, Dialect, Kind, Loss
from docs.generator.markdown import plain, table

# An option of a framework that names a loss, as a note of the catalogue writes it: "loss_type grpo".
OPTION = re.compile(
    r"\b(loss_type|loss_mode|critic_type|advantage_estimator|advantage_normalization_type|loss_fn|loss_reduction"
    r"|distillation_mode|multi_objective_aggregation|vllm_importance_sampling_mode|scale_rewards"
    r"|norm_adv_by_std_in_grpo:|class|called)[ =]\"?((?!is |a |the )[\w+-]+)(?![\w+-]|\"? is )"
)
KL_TYPES = re.compile(r"\bkl_loss_type \"?([\w+]+(?:, [\w+]+)*)")
FUNCTION = re.compile(r"(?:^|[\s/])(_?[A-Za-z]\w*(?:\.\w+)*)(?= ?@|\s*\(|;|,|$)")
LEVEL = re.compile(r"\bwith (importance_sampling_level) (\w+)")
EXPERIMENTAL = re.compile(r"\bexperimental/(\w+)/\w+\.py (?=\w+Trainer\b)")
NO_CODE = {"TRL", "PRIME", "OpenRLHF", "_compute_loss"}  # names of projects, and one that many losses share
INTRODUCTION = """# Which loss is this?

The name that a framework gives to a loss, and the name that gives the same numbers here. Two frameworks may
give one name to different losses: TRL's `cispo` and verl's are two dialects of one loss. Search this page
for an option, a function or a parameter of your framework.
"""


def pages() -> dict[str, str]:
    """The Markdown of the reverse index."""
    parts = [INTRODUCTION]
    found = [(loss, dialect) for loss in registry().losses for dialect in loss.dialects]
    unknown = {dialect.framework for _, dialect in found} - set(frameworks())
    assert not unknown, f"composer_plugins/frameworks has no table of {', '.join(sorted(unknown))}"
    for framework, one in frameworks().items():
        named, entries = _by_row(one), list[str]()
        for loss, dialect in found:
            if dialect.framework == framework:
                first, *others = named.pop((loss.kind, f"{loss.name}@{dialect.upstream}"), [there(dialect)])
                note = f": {plain(dialect.note)}" if dialect.note else ""
                entries.append(f"- {first} → {_here(loss, dialect)}{note}")
                entries += [f"- {theirs} → {_here(loss, dialect)}" for theirs in others]
        entries += [f"- {theirs} → `{row}`" for (_, row), names in named.items() for theirs in names]
        parts += [f"## {one.title}\n\n" + "\n".join(entries) + "\n"] if entries else []
    published = [(f"`{name}`", plain(text)) for name, text in PARTS.items()]
    parts.append("## Published names that are no loss of their own\n\n" + table(("name", "here"), published))
    what = "A parameter of a framework, and the one here. If the value differs, the second column says how."
    head = f"## Parameters\n\n{what}\n\n"
    parts.append(head + table(("there", "here", "of"), _parameters()))
    return {"losses/names.md": "\n".join(parts)}


def _by_row(framework: Framework) -> dict[tuple[Kind, str], list[str]]:
    """By kind and row, the options of a framework that choose it: "`loss_type: grpo`", one for each way."""
    found = dict[tuple[Kind, str], list[str]]()
    for one in framework.losses:
        chosen = ", ".join(f"`{key}: {value}`" for key, value in one.options.items())
        if (having := framework.releases_of(one)) != framework.releases:
            first, last = having[0], having[-1]
            chosen += f" ({first})" if first == last else f" ({first} to {last})"
        found.setdefault((one.kind, one.row), []).append(chosen)
    return found


def there(dialect: Dialect) -> str:
    """The framework's own names: the option that chooses the loss, and what computes it."""
    text = f"{dialect.source} {dialect.note}"
    names = [
        f"`{value}`" if option in ("class", "called") else f"`{option.rstrip(':')}: {value}`"
        for option, value in OPTION.findall(text)[:1]
    ]
    names += [f"`{option}: {value}`" for option, value in LEVEL.findall(text)]
    names += [f"`kl_loss_type: {value}`" for types in KL_TYPES.findall(text) for value in types.split(", ")]
    code = [word for word in FUNCTION.findall(dialect.source) if "_" in word or not word.islower()]
    code = [word for word in code if not word.endswith((".py", "_")) and word not in NO_CODE]
    module = EXPERIMENTAL.search(dialect.source)
    where = f" (trl.experimental.{module[1]})" if module else ""
    names += [f"`{word.removesuffix('._compute_loss')}`{where}" for word in code[:1]]
    return ", ".join(names) or plain(dialect.source)


def _here(loss: Loss, dialect: Dialect) -> str:
    kind = KINDS[loss.kind].singular.partition(" ")[2]
    return f"[`{loss.name}@{dialect.upstream}`]({loss.kind}/{loss.name}.md#{anchor(loss, dialect)}), {kind}"


def anchor(loss: Loss, dialect: Dialect) -> str:
    """The id of a dialect's heading on the page of its loss, as the extension toc makes it."""
    return re.sub(r"[^\w-]", "", f"{loss.name}@{dialect.upstream}").lower()


def _parameters() -> Iterator[tuple[str, str, str]]:
    """Each name that a framework has for a parameter of ours, with the losses that have the parameter."""
    found: dict[tuple[str, str], list[str]] = {}
    for loss in registry().losses:
        for name, sets in other_names(loss).items():
            for own, conversion in sets.items():
                theirs = conversion.formula(name)
                ours = f"`{own}`" if theirs == name else f"`{own} = {theirs}`"
                found.setdefault((name, ours), []).append(f"[{loss.name}]({loss.kind}/{loss.name}.md)")
    for (name, ours), losses in sorted(found.items()):
        yield f"`{name}`", ours, ", ".join(losses)
