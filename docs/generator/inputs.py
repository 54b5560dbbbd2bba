"""The tables of docs/writing_a_loss.md: which framework has which input of a policy loss, and when."""

from composer_plugins.frameworks.inputs import INSTEAD, WHEN
from composer_plugins.frameworks.registry import running
from composer_plugins.losses.inputs import INPUTS
from docs.generator.markdown import table


def of_policy_losses() -> str:
    """A row to an input, and below it one to each input that a framework does not always have."""
    frameworks = [one for one in running() if "policy" in one.provides]
    rows, more = [], []
    for name in INPUTS:
        if not any(name in one.provides["policy"] for one in frameworks):
            continue
        cells = []
        for one in frameworks:
            when, instead = (texts.get(one.name, {}).get(name) for texts in (WHEN, INSTEAD))
            has = name in one.provides["policy"]
            cells.append(("see below" if when else "yes") if has else "no")
            if when or instead:
                more.append((f"`{name}`", one.title, when or f"not there: {instead}"))
        rows.append((f"`{name}`", *cells))
    titles = [one.title for one in frameworks]
    return f"{table(('input', *titles), rows)}\n{table(('input', 'framework', 'when'), more)}"
