"""slime's side of `doctor` and `migrate`: its arguments, and our options where the loss is ours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_plugins.adapters.slime_loss.options import BY_ROLLOUT, NODE, OF_TEACHER, asked_of
from composer_plugins.errors import ConfigError, Finding
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.differences import OF_A_POLICY, differences
from composer_plugins.objective.objective import NORM, Objective, named_policy, without_policy

OURS = "composer_plugins.adapters.slime_loss.loss_fn"
PATH, TYPE = "custom_loss_function_path", "loss_type"


class Configs(ByTable):
    """The arguments of slime, as a command line or the YAML of --custom-config-path gives them."""

    def __init__(self) -> None:
        super().__init__(SLIME)
        self.KNOWN |= {PATH, *OF_TEACHER}

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

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """slime's own loss where it is the same one, and otherwise ours: a file for --custom-config-path."""
        if objective.no_policy or self._is_own(objective):
            return super().write(objective, version)
        node, mode = named_policy(objective), objective.mode
        if "policy_weight" in objective.channels:
            node["policy_weight"] = objective.channels["policy_weight"]
        if mode in BY_ROLLOUT and mode != BY_ROLLOUT[0] and (mode != NORM or objective.length):
            node |= {"mode": mode} | ({"max_length": objective.length} if mode == NORM else {})
        default = choose("policy", SLIME.losses[0].row)
        beside = super().write(replace(objective, policy=default), version)
        return {TYPE: "custom_loss", PATH: OURS, **beside, NODE: node}

    def _is_own(self, objective: Objective) -> bool:
        """Whether slime has this policy loss itself."""
        try:
            read = super().read(super().write(objective))[0]
        except ConfigError:
            return False
        differing = {one.what.partition(".")[0] for one in differences(objective, read)}
        return differing.isdisjoint({*OF_A_POLICY, "policy_weight"})


_configs = Configs()
read, write, render, release = _configs.read, _configs.write, _configs.render, _configs.release
unread = _configs.unread
KNOWN = _configs.KNOWN
