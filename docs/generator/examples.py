"""The worked example of `composer-plugins explain` as tables of a page."""

from composer_plugins.cli.example import at, example_of, given_to, label_of, positions_of, written
from composer_plugins.cli.worked_example import record
from composer_plugins.losses.registry import collect, get_plugin_manager
from composer_plugins.losses.row import Loss
from docs.generator.markdown import table


def tables(loss: Loss) -> str:
    """The numbers that the paper's loss and each dialect give, and what they were given."""
    example = example_of(loss, (None, *loss.dialects))
    above, beside = given_to(example)
    parts = []
    if values := [f"`{name}={value}`" for name, value in example.parameters.items()]:
        parts.append(f"With {', '.join(values)}.")
    if above:
        parts.append(table(("given", ""), [(f"`{name}`", f"`{written(x)}`") for name, x in above.items()]))
    for quantity, x in next(iter(example.results.values())).items():
        positions = positions_of(x)
        # A row to a dialect: a table with a column to each is wider than the page.
        shown = [(f"`{name}`", given) for name, given in beside.items()]
        shown += [
            ("paper" if c == "default" else f"`{c}`", one[quantity]) for c, one in example.results.items()
        ]
        rows = [(name, *(written(at(one, p)) for p in positions)) for name, one in shown]
        title = {"loss": "The loss:", "value": "The value:"}.get(quantity, "Its gradient:")
        parts.append(f"{title}\n\n" + table(("", *map(label_of, positions)), rows, numbers_from=1))
        beside = {}
    return "\n\n".join(parts)


def recorded() -> str:
    """What `explain` and `diff` know of our kernels without torch."""
    return record(collect(get_plugin_manager(entry_points=False)).losses)
