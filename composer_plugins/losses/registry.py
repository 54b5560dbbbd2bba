"""The plugin manager: it collects our losses, and the losses of every installed plugin.

A plugin is a distribution with an entry point in the group `composer_plugins`, which names a module or an
object with our hooks (`hookspecs.py`). A fault in one plugin is kept as a `Problem` that names its
distribution, and the other plugins load.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, distributions
from typing import Any, NamedTuple

import pluggy

from composer_plugins import hookspecs
from composer_plugins.errors import ConfigError, in_a_line, unknown
from composer_plugins.losses.row import Loss

GROUP = hookspecs.PROJECT
OURS = "composer-plugins"


class Problem(NamedTuple):
    """A fault of a plugin, and the distribution that brought it; "" for a function by import path."""

    distribution: str
    message: str
    loss: str | None = None  # the loss that is missing for it; "" for none, None where it may be any

    def __str__(self) -> str:
        return f"plugin of {self.distribution}: {self.message}" if self.distribution else self.message


class PluginWarning(UserWarning):
    """A plugin that did not load, or only in part."""


class Registry(NamedTuple):
    """Every loss that was registered, and the problems of those that could not be."""

    losses: tuple[Loss, ...]
    origins: dict[tuple[str, str], str]  # the distribution of a loss, by its kind and name
    problems: tuple[Problem, ...]


class PluginManager(pluggy.PluginManager):
    """Pluggy's manager, which keeps the problems of plugins that could not be registered."""

    def __init__(self) -> None:
        super().__init__(GROUP)
        self.problems: list[Problem] = []


def get_plugin_manager(*, entry_points: bool = True) -> PluginManager:
    """A new manager with our hooks, the bundled losses and, with `entry_points`, every installed plugin."""
    from composer_plugins.losses import bundled  # a process that only stamps samples asks for no loss

    manager = PluginManager()
    manager.add_hookspecs(hookspecs)
    manager.register(bundled, name=OURS)
    manager.check_pending()
    for distribution, entry_point in _installed() if entry_points else ():
        try:
            add_plugin(manager, entry_point.load(), distribution)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever its import raises, the other plugins must load
            reason = f"{entry_point.value} fails on import: {in_a_line(error)}"
            manager.problems.append(Problem(distribution, reason))
    return manager


def add_plugin(manager: PluginManager, plugin: object, distribution: str) -> None:
    """Register a module or an object with our hooks; if that fails, keep the problem."""
    name = f"{distribution} ({getattr(plugin, '__name__', type(plugin).__name__)})"
    try:
        manager.register(plugin, name=name)
        manager.check_pending()  # a misspelt hook would otherwise be ignored
        if not manager.get_hookcallers(plugin):
            remedy = f"implement {' or '.join(_hooks())} with @hookimpl"
            raise ConfigError("hooks", "it implements none", remedy)
    except pluggy.PluginValidationError as error:
        manager.problems.append(Problem(distribution, _misspelt(plugin) or str(error)))
    except (ConfigError, ValueError) as error:
        manager.problems.append(Problem(distribution, str(error)))
    else:
        return
    if manager.is_registered(plugin):
        manager.unregister(plugin)


def collect(manager: PluginManager, *, kernels: bool = True) -> Registry:
    """Call the hooks of every plugin, one plugin at a time, and keep the rows that pass `check_row`.

    Without `kernels` no kernel is imported, and so none is checked.
    """
    losses: dict[tuple[str, str], Loss] = {}
    origins: dict[tuple[str, str], str] = {}
    problems = list(manager.problems)
    for distribution, found, problem in registered(manager, "register_losses"):
        problems += [problem] if problem else []
        for loss in found:
            try:
                if distribution != OURS:  # the tests check ours, which loads torch
                    from composer_plugins.losses.derived import check_row

                    check_row(loss, kernel=kernels)
                key = (loss.kind, loss.name)
                if key in losses:
                    taken = f"the name of {losses[key].path}, which {origins[key]} registered"
                    where = f"{loss.kind} {loss.name!r}"
                    raise ConfigError(where, f"{loss.path} has {taken}", "rename the loss")
            except ConfigError as error:
                problems.append(Problem(distribution, str(error), _name(loss)))
            except (Exception, SystemExit) as error:  # a row that holds anything at all
                message = f"the check of its row {_name(loss)!r} fails: {in_a_line(error)}"
                problems.append(Problem(distribution, message, _name(loss)))
            else:
                losses[key], origins[key] = loss, distribution
    return Registry(tuple(losses.values()), origins, tuple(problems))


@cache
def registry() -> Registry:
    """Every loss that is installed here, collected once, with a warning for each problem."""
    found = collect(get_plugin_manager())
    warn_of(found.problems)
    return found


def warn_of(problems: Iterable[Problem]) -> None:
    """Warn of each problem."""
    for problem in problems:
        warnings.warn(str(problem), PluginWarning, stacklevel=3)


def losses() -> tuple[Loss, ...]:
    """Every registered loss; of two kinds, two may share a name."""
    return registry().losses


def registered(manager: PluginManager, hook: str) -> Iterator[tuple[str, list[Any], Problem | None]]:
    """Yield for each plugin its distribution, what it registers with this hook, and the problem of the hook.

    Each plugin is called alone, so that a fault in one does not take the others down.
    """
    for name, plugin in manager.list_name_plugin():
        distribution, found = name.partition(" (")[0], list[Any]()
        others = [other for _, other in manager.list_name_plugin() if other is not plugin]
        try:
            manager.subset_hook_caller(hook, others)(register=found.append)
        except (Exception, SystemExit) as error:  # a plugin's own code
            yield distribution, [], Problem(distribution, f"its hook fails: {in_a_line(error)}")
        else:
            yield distribution, found, None


def _name(loss: object) -> str:
    return str(getattr(loss, "name", loss))


def _installed() -> Iterator[tuple[str, EntryPoint]]:
    """Each entry point of our group with its distribution; one seen twice on the path counts once."""
    seen: set[tuple[str, str, str]] = set()
    for distribution in distributions():
        for entry_point in distribution.entry_points.select(group=GROUP):
            name = distribution.metadata["Name"]
            key = (name, entry_point.name, entry_point.value)
            if key not in seen:
                seen.add(key)
                yield f"{name} {distribution.version}", entry_point


def _hooks() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("register_")]


def _misspelt(plugin: object) -> str | None:
    """Which of a plugin's hooks we do not have, with the nearest that we do; or an argument misnamed."""
    for name in dir(plugin):
        member: Any = getattr(plugin, name, None)
        if not hasattr(member, f"{GROUP}_impl"):
            continue
        if name not in _hooks():
            return str(unknown(name, name, _hooks(), noun="hook"))
        if other := [argument for argument in inspect.signature(member).parameters if argument != "register"]:
            return f"{name}: its argument is named {other[0]!r}; name it 'register'"
    return None
