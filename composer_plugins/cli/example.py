"""The worked example of a loss, as recorded or else computed, and its numbers on a page."""

from collections.abc import Sequence

from composer_plugins.cli.recorded import Example, Numbers, column, examples, record_of
from composer_plugins.losses.row import Dialect, Loss

# Positions of the example that are shown, [*batch, tokens]: the last is masked, and always 0.
SHOWN_TOKENS: list[tuple[int, ...]] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def example_of(loss: Loss, dialects: Sequence[Dialect | None]) -> Example:
    """The example with the defaults (None) and in dialects. If it is not recorded, torch computes it."""
    if record := record_of(loss):
        found = record["results"]
        results = {name: found.get(name, found["default"]) for name in map(column, dialects)}
        return Example(examples(loss), record["inputs"], results)
    from composer_plugins.cli import worked_example  # loads torch

    return worked_example.computed(loss, dialects)


def shape(x: Numbers) -> tuple[int, ...]:
    """The shape of nested lists."""
    return (len(x), *shape(x[0])) if isinstance(x, list) else ()


def given_to(example: Example) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """The example's inputs: first the inputs with more axes than the result, then the others."""
    axes = len(shape(next(iter(next(iter(example.results.values())).values()))))
    flat = {name: x for name, x in example.inputs.items() if len(shape(x)) <= 2}
    above = {name: x for name, x in flat.items() if len(shape(x)) > axes and (name != "mask" or not axes)}
    return above, {name: x for name, x in flat.items() if len(shape(x)) <= axes and name != "mask"}


def positions_of(x: Numbers) -> list[tuple[int, ...]]:
    """The positions of a result that are shown."""
    if not (sizes := shape(x)):
        return [()]
    return [(i,) for i in range(sizes[0])] if len(sizes) == 1 else SHOWN_TOKENS


def label_of(position: tuple[int, ...]) -> str:
    """A position in words."""
    return ("", "row {}", "rollout {} token {}")[len(position)].format(*position)


def at(x: Numbers, position: tuple[int, ...]) -> Numbers:
    """One number of those that broadcast against the positions."""
    for i in position[len(position) - len(shape(x)) :]:
        x = x[min(i, len(x) - 1)]
    return x


def written(x: Numbers) -> str:
    """Numbers as the page writes them."""
    return f"[{', '.join(map(written, x))}]" if isinstance(x, list) else f"{float(x):.4g}"
