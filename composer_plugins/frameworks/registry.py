"""The known frameworks: ours, and the frameworks of every installed plugin (`register_frameworks`)."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import Conversion, Framework, parameters_of
from composer_plugins.frameworks.nemo_rl import NEMO_RL
from composer_plugins.frameworks.others import OTHERS
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.frameworks.skyrl import SKYRL
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.frameworks.tinker import TINKER
from composer_plugins.frameworks.torchtitan import TORCHTITAN
from composer_plugins.frameworks.trl import TRL
from composer_plugins.frameworks.verl import VERL
from composer_plugins.losses.registry import PluginManager, Problem, get_plugin_manager, registered, warn_of
from composer_plugins.losses.row import Loss

OURS = (TRL, VERL, PRIME_RL, SKYRL, TINKER, NEMO_RL, SLIME, TORCHTITAN, *OTHERS)


class Frameworks(NamedTuple):
    """Every framework by its name, and the problems of those that could not be registered."""

    known: Mapping[str, Framework]
    problems: tuple[Problem, ...]


def collect(manager: PluginManager) -> Frameworks:
    """Call the hook of every plugin, one plugin at a time, and keep the frameworks that are sound."""
    known, problems = {one.name: one for one in OURS}, list[Problem]()
    for distribution, found, problem in registered(manager, "register_frameworks"):
        problems += [problem] if problem else []
        for framework in found:
            if not isinstance(framework, Framework):
                remedy = "pass a composer_plugins.frameworks.contract.Framework"
                wrong = ConfigError("register", f"it got {framework!r}", remedy)
            elif (name := framework.name) in known:
                wrong = ConfigError(f"framework {name!r}", "there is one already", "rename it")
            else:
                known[name] = framework
                continue
            problems.append(Problem(distribution, str(wrong), ""))
    return Frameworks(known, tuple(problems))


@cache
def frameworks() -> Mapping[str, Framework]:
    """Every framework that is known here, collected once, with a warning for each problem."""
    found = collect(get_plugin_manager())
    warn_of(found.problems)
    return found.known


def conventions() -> dict[str, str]:
    """The calling conventions by name, "module:object": one per framework, and one for plain functions."""
    found = {name: one.convention for name, one in frameworks().items() if one.convention}
    return found | {"torch": "composer_plugins.testing.conventions.functional:TORCH"}


def running() -> list[Framework]:
    """The frameworks in which our losses run."""
    return [one for one in frameworks().values() if one.provides]


def other_names(loss: Loss, among: Iterable[Framework] = ()) -> dict[str, dict[str, Conversion]]:
    """By a framework's name of an option, the parameters of a loss that it sets, with their conversions."""
    found: dict[str, dict[str, Conversion]] = {}
    for framework in among or frameworks().values():
        options = {one.key.rpartition(".")[2]: one.sets for one in framework.options_of(loss.kind)}
        for name, sets in (*options.items(), *framework.names.items()):
            found.setdefault(name, {}).update(parameters_of(sets, loss))
    return {name: sets for name, sets in found.items() if sets and name not in loss.parameters}


def what_to_set(loss: Loss, name: str, where: str = "", among: Iterable[Framework] = ()) -> str:
    """The remedy for an option that a framework has for a parameter of this loss; "" if none has.

    `where` says where the parameter is set (" in policy_params").
    """
    found: dict[str, list[str]] = {}
    for own, conversion in other_names(loss, among).get(name, {}).items():
        found.setdefault(conversion.formula(name), []).append(own)
    return " and ".join(
        f"set {' and '.join(own)}{where}"
        + (f" to {theirs}" if theirs != name else f", its name{'s' * (len(own) > 1)} here")
        for theirs, own in found.items()
    )


def called(loss: Loss) -> dict[str, list[str]]:
    """What frameworks call each parameter of this loss, in terms of their options: "epsilon_high - 1"."""
    found: dict[str, list[str]] = {}
    for name, sets in other_names(loss).items():
        for own, conversion in sets.items():
            found.setdefault(own, []).append(conversion.formula(name))
    return found
