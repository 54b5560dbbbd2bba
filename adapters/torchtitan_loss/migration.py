"""torchtitan's side of `composer-plugins doctor` and `migrate`: the class of a loss, with its keywords."""

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from composer_plugins.adapters.torchtitan_loss.options import FIELDS, parse
from composer_plugins.errors import ComposerWarning, ConfigError, Finding, in_a_line
from composer_plugins.frameworks.torchtitan import ESTIMATOR, LOSS, MODE, OWN, TORCHTITAN
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.derived import function_of_import_path
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.files import replaced
from composer_plugins.objective.objective import Behaviour, Objective, behaviours, channels_of, named_policy

ROLLOUT: Behaviour = "rollout engine"
RL = "torchtitan.experiments.rl"
REST = "the rest"  # the key of what is not looked at, in words
OUR_MODULE = "composer_plugins.adapters.torchtitan_loss.loss"


class Titan(ByTable):
    """torchtitan's own losses by the table, and our class."""

    def __init__(self) -> None:
        super().__init__(TORCHTITAN)
        self.KNOWN |= {*FIELDS}

    def unread(self, table: Mapping[str, Any], version: str | None = None) -> Iterator[str]:
        """The keys that are not looked at, and all of a config but its loss."""
        yield from filter(None, [table.get(REST)])
        yield from super().unread({key: x for key, x in table.items() if key != REST})

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What torchtitan trains with the keywords of a loss's config."""
        if table.get(LOSS) != OWN:
            objective, found = super().read(table, version)
            old, rollout = behaviours(objective.policy, ROLLOUT, ROLLOUT)
            return replace(objective, old=old, rollout=rollout), found
        asked, found = parse({name: table[name] for name in FIELDS if name in table})
        found.refuse()
        assert asked is not None
        old, rollout = behaviours(asked.choice, ROLLOUT, ROLLOUT)
        read = replace(self.objective(table, asked.choice), mode=MODE, old=old, rollout=rollout)
        return replace(read, channels=channels_of(asked.config)), found

    def write(self, objective: Objective, version: str | None = None) -> dict[str, Any]:
        """The keywords of torchtitan's own loss if it is the same, and otherwise of our loss."""
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
        lines = [f"from {OUR_MODULE if name == OWN else f'{RL}.losses'} import {name}", ""]
        lines += [f"loss = {name}.Config({', '.join(f'{key}={x!r}' for key, x in given.items())})"]
        if ESTIMATOR in table:
            lines += ["", f"from {RL}.rollout.advantage import AdvantageEstimator", ""]
            lines += [f"advantage = AdvantageEstimator.Config({ESTIMATOR}={table[ESTIMATOR]!r})"]
            lines[-1] += "  # of Rollouter.Config"
        return "\n".join(lines) + "\n"


def merged_config(files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """The loss in what a config function makes, given as module:function, with options."""
    if len(files) > 1:
        raise ConfigError("FILE", f"{len(files)} are given", "give one config function")
    return replaced(loss_of(str(files[0])) if files else {}, overrides)


def made_by(path: str) -> Any:
    """What a config function of torchtitan makes; ConfigError where it cannot be called."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ComposerWarning)  # `read` returns them
            return function_of_import_path(path, path)()
    except ConfigError as error:
        if error.key != path or sys.modules.get(TORCHTITAN.package):
            raise
        raise ConfigError(path, error.problem, "run this command where torchtitan is installed") from None
    except Exception as error:
        raise ConfigError(path, f"the function fails: {in_a_line(error)}", "correct it") from error


def loss_of(path: str) -> dict[str, Any]:
    """The class of the loss and its keywords, in a config of the RL trainer, or in a config of a loss."""
    config, place, table = made_by(path), "", dict[str, Any]()
    advantage = getattr(getattr(config, "rollouter", None), "advantage", None)
    if hasattr(advantage, ESTIMATOR):
        table[ESTIMATOR] = getattr(advantage, ESTIMATOR)
    for name in ("trainer", "loss"):
        if hasattr(config, name):
            config, place = getattr(config, name), f"{place}.{name}".lstrip(".")
    if place:
        table[REST] = f"all but {' and '.join([place, *table])}"
    config = getattr(config, "loss_fn", config)  # of ChunkedLossWrapper
    if not is_dataclass(config):
        problem = f"it makes a {type(config).__name__}, which has no loss"
        raise ConfigError(path, problem, "name a function that makes a config of torchtitan's RL trainer")
    table[LOSS] = type(config).__qualname__.removesuffix(".Config").rpartition(".")[2]
    return table | {one.name: getattr(config, one.name) for one in fields(config)}


TITAN = Titan()
KNOWN = TITAN.KNOWN
read, unread, write = TITAN.read, TITAN.unread, TITAN.write
render, release = TITAN.render, TITAN.release
