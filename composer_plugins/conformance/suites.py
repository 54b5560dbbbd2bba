"""The claims about a framework that is installed here, or about a checkout of it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from composer_plugins.errors import ConfigError, in_a_line
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.registry import frameworks

if TYPE_CHECKING:
    from composer_plugins.conformance.running import Suite  # loads torch


def compared() -> dict[str, Framework]:
    """The frameworks with claims, by name."""
    return {name: one for name, one in frameworks().items() if one.claims}


def suite_of(framework: Framework, source: Path | None) -> "Suite | None":
    """The claims about what is installed, or None; ConfigError where it cannot be imported."""
    if framework.package and find_spec(framework.package) is None or not framework.package and source is None:
        return None
    try:
        made: Suite = import_module(framework.claims).suite(*([] if framework.package else [source]))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # transformers raises a RuntimeError
        problem = f"it cannot be imported ({in_a_line(error)})"
        raise ConfigError(framework.name, problem, framework.install) from error
    return made
