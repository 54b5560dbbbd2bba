"""The worked example of `composer-plugins explain` as tables of a page."""

from composer_plugins.cli.worked_example import (
    at,
    examples,
    given_to,
    label_of,
    positions_of,
    results_of,
    written,
)
from composer_plugins.losses.row import Loss
from docs.generator.markdown import table


def tables(loss: Loss) -> str:
    """The numbers that the paper's loss and each dialect give, and what they were given."""
    results = results_of(loss, loss.dialects)
    first = next(iter(results.values()))
    above, beside = given_to(loss, first)
    parts = []
    if values := examples(loss):
        parts.append("With " + ", ".join(f"`{name}={value}`" for name, value in values.items()) + ".")
    if above:
        parts.append(table(("given", ""), [(f"`{name}`", f"`{written(x)}`") for name, x in above.items()]))
    for quantity, x in first.items():
        positions = positions_of(x.shape)
        # A row to a dialect: a table with a column to each is wider than the page.
        shown = [(f"`{name}`", given) for name, given in beside.items()]
        shown += [("paper" if c == "default" else f"`{c}`", one[quantity]) for c, one in results.items()]
        rows = [(name, *(written(at(one, p)) for p in positions)) for name, one in shown]
        title = {"loss": "The loss:", "value": "The value:"}.get(quantity, "Its gradient:")
        parts.append(f"{title}\n\n" + table(("", *map(label_of, positions)), rows, numbers_from=1))
        beside = {}
    return "\n\n".join(parts)
