"""The table of docs/prime_rl.md: the options of PRIME-RL's own losses, and what they are called here.

`python -m docs.generator.prime_rl_options` writes it into that page, from the framework's table.
"""

from collections.abc import Iterator

from composer_plugins.adapters.prime_rl_plugin.own_losses import PARAMS, fixed, inline, policy, versions
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.prime_rl import PRIME_RL
from docs.generator.tables import ROOT

PAGE = ROOT / "docs" / "prime_rl.md"
HEAD = "| PRIME-RL | its loss | here | its option, with its default | here, below `kwargs` |"


def cell(own: NamedLoss, option: Option) -> str:
    """What the option sets here, with the formula where the value is another one."""
    sets = {f"{PARAMS}.{name}": one for name, one in parameters_of(option.sets, policy(own).loss).items()}
    sets = sets or {option.objective.removeprefix("channels."): option.conversion}
    found = ", ".join(f"`{name}`" for name in sets)
    formula = next(iter(sets.values())).formula("value")
    found += f" = {formula}" if formula != "value" else ""
    other, *values = option.only_with or ("",)
    only = f"only with {other} = {inline(values[0])}" if other else ""
    return "; ".join(filter(None, (found, option.remark, only)))


def lines() -> Iterator[str]:
    """The table, in Markdown."""
    yield HEAD
    yield "|---|---|---|---|---|"
    for own in PRIME_RL.losses:
        names = fixed(own) | {f"{PARAMS}.{name}": x for name, x in own.params.items()}
        ours = ", ".join(f"`{name} = {inline(x)}`" for name, x in names.items())
        start = f"| {versions(own)} | `{own.options['type']}` | {ours} |"
        for option in own.own:
            yield f"{start} `{option.key} = {inline(option.default)}` | {cell(own, option)} |"
            start = "| | | |"


def written(page: str) -> str:
    """The page with the table in the place of the one that it has."""
    begin = page.index(HEAD)
    return page[:begin] + "\n".join(lines()) + page[page.index("\n\n", begin) :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
