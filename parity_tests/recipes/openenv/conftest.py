"""The tests of recipes/openenv need a sandbox, which a container may not permit."""

from composer_plugins.errors import ConfigError
from composer_plugins.recipes.openenv.sandbox import Sandbox

REASON = ""
try:
    Sandbox().check()
except ConfigError as error:
    REASON = f"recipes/openenv: not collected, because {error}"
collect_ignore_glob = ["test_*.py"] if REASON else []


def pytest_terminal_summary(terminalreporter: object) -> None:
    """Say what was not run."""
    if REASON:
        print(REASON)
