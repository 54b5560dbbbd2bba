"""torchtitan's side of `composer-plugins doctor` and `migrate`: the class of a loss, with its keywords."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from composer_plugins.adapters.torchtitan_loss.surface import FIELDS, parse
from composer_plugins.findings import Finding
from composer_plugins.frameworks.torchtitan import ESTIMATOR, LOSS, MODE, OWN, TORCHTITAN
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.objective import Behaviour, Objective, behaviours, channels_of, named_policy

ROLLOUT: Behaviour = "rollout engine"
RL = "torchtitan.experiments.rl"
IMPORTS = {OWN: "composer_plugins.adapters.torchtitan_loss.loss"}


class Titan(ByTable):
    """torchtitan's own losses by the table, and our class."""

    def __init__(self) -> None:
        super().__init__(TORCHTITAN)
        self.KNOWN |= {*FIELDS}

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What torchtitan trains with the keywords of a loss's config."""
        if table.get(LOSS) != OWN:
            objective, found = super().read(table, version)
            old, rollout = behaviours(objective.policy, ROLLOUT, ROLLOUT)
            return replace(objective, old=old, rollout=rollout), found
        (policy, config), found = parse({name: table[name] for name in FIELDS if name in table})
        old, rollout = behaviours(policy, ROLLOUT, ROLLOUT)
        read = replace(self.objective(table, policy), mode=MODE, old=old, rollout=rollout)
        return replace(read, channels=channels_of(config)), found

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """The keywords of torchtitan's own loss where it is the same one, and otherwise of ours."""
        stand_in = replace(objective, policy=choose("policy", TORCHTITAN.losses[0].row), no_policy="")
        is_plain = not objective.no_policy and "policy_weight" not in objective.channels
        if is_plain and self.written("policy", objective.policy, is_exact=True) is not None:
            return super().write(objective, version)
        table = {LOSS: OWN, **named_policy(objective)}
        table |= {name: x for name, x in objective.channels.items() if name in FIELDS}
        return table | {name: x for name, x in super().write(stand_in, version).items() if name == ESTIMATOR}

    def render(self, table: Mapping[str, Any]) -> str:
        """The lines of Python with which a function of torchtitan's configs makes this loss."""
        name = str(table[LOSS])
        given = {key: x for key, x in table.items() if key not in (LOSS, ESTIMATOR)}
        lines = [f"from {IMPORTS.get(name, f'{RL}.losses')} import {name}", ""]
        lines += [f"loss = {name}.Config({', '.join(f'{key}={x!r}' for key, x in given.items())})"]
        if ESTIMATOR in table:
            lines += ["", f"from {RL}.rollout.advantage import AdvantageEstimator", ""]
            lines += [f"advantage = AdvantageEstimator.Config({ESTIMATOR}={table[ESTIMATOR]!r})"]
            lines[-1] += "  # of Rollouter.Config"
        return "\n".join(lines) + "\n"


TITAN = Titan()
KNOWN, NO_BEARING = TITAN.KNOWN, TITAN.NO_BEARING
read, unread, write = TITAN.read, TITAN.unread, TITAN.write
render, release, not_known = TITAN.render, TITAN.release, TITAN.not_known
