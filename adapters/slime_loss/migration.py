"""slime's side of `doctor` and `migrate`: its arguments, and our options where the loss is ours."""

from collections.abc import Mapping
from typing import Any

from composer_plugins.adapters.slime_loss.surface import NODE, asked_of
from composer_plugins.findings import Finding
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.objective import Objective, without_policy

OURS = "composer_plugins.adapters.slime_loss.loss_fn"
PATH, TYPE = "custom_loss_function_path", "loss_type"


class Surface(ByTable):
    """The arguments of slime, as a command line or the YAML of --custom-config-path gives them."""

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What slime trains with these arguments."""
        kind, path = table.get(TYPE, "policy_loss"), table.get(PATH)
        if kind == "custom_loss" and path == OURS:
            own = {key: x for key, x in table.items() if key not in (TYPE, PATH, NODE)}
            found, wrong = asked_of(own, table.get(NODE) or {})
            why = "its options have errors"
            return (found.objective if found else without_policy(why)), [*wrong]
        findings = []
        if table.get(NODE) is not None:
            problem = f"only our loss reads it, and {TYPE} is {kind!r} with {PATH} {path!r}"
            findings = [Finding("error", NODE, problem, f"set {TYPE}=custom_loss and {PATH}={OURS}")]
        if kind == "custom_loss":
            return without_policy(f"{path} is a loss of your own"), findings
        if kind != "policy_loss":
            return without_policy(f"{TYPE} is {kind!r}"), findings
        objective, more = super().read(table, version)
        return objective, [*findings, *more]


_surface = Surface(SLIME)
read, write, render, release = _surface.read, _surface.write, _surface.render, _surface.release
unread, not_known = _surface.unread, _surface.not_known
KNOWN, NO_BEARING = _surface.KNOWN, _surface.NO_BEARING
