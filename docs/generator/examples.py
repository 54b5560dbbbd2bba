"""The worked example of `composer-plugins explain` as tables of a page."""

from torch import Tensor

from composer_plugins.cli.example_tables import at, label_of, positions_of, results_of, written
from composer_plugins.cli.worked_example import examples, tensors
from composer_plugins.losses.row import Loss
from docs.generator.markdown import table


def tables(loss: Loss) -> str:
    """The numbers that the paper's loss and each dialect give, and what they were given."""
    results = results_of(loss, loss.dialects)
    first = next(iter(results.values()))
    axes = next(iter(first.values())).dim()
    given = {name: x for name, x in tensors(loss).items() if isinstance(x, Tensor) and x.dim() <= 2}
    beside = {name: x for name, x in given.items() if x.dim() <= axes and name != "mask"}
    above = {name: x for name, x in given.items() if x.dim() > axes and (name != "mask" or not axes)}
    parts = []
    if values := examples(loss):
        parts.append("With " + ", ".join(f"`{name}={value}`" for name, value in values.items()) + ".")
    if above:
        parts.append(table(("given", ""), [(f"`{name}`", f"`{written(x)}`") for name, x in above.items()]))
    for quantity, x in first.items():
        head = [
            "",
            *(f"`{name}`" for name in beside),
            *("paper" if c == "default" else f"`{c}`" for c in results),
        ]
        shown = [*beside.values(), *(result[quantity] for result in results.values())]
        rows = [(label_of(p), *(written(at(one, p)) for one in shown)) for p in positions_of(x.shape)]
        title = {"loss": "The loss:", "value": "The value:"}.get(quantity, "Its gradient:")
        parts.append(f"{title}\n\n" + table(head, rows, numbers_from=1))
        beside = {}
    return "\n\n".join(parts)
