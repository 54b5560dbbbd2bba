"""Which frameworks can be compared with, and how to install one that is not here."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from composer_plugins.errors import ConfigError, in_a_line

if TYPE_CHECKING:
    from composer_plugins.conformance.running import Suite  # loads torch

CLONE = (
    "git clone https://github.com/PrimeIntellect-ai/prime-rl, add --source prime-rl, and pip install "
    "transformers pydantic-settings prime-pydantic-config tomli tomli-w loguru msgspec"
)


class Framework(NamedTuple):
    """One framework, its name in the command, and what to do where it is missing."""

    name: str
    title: str
    missing: str
    remedy: str
    package: str = ""  # "" where it is run from a checkout

    def suite(self, source: Path | None) -> "Suite | None":
        """The claims about what is installed, or None; ConfigError where it cannot be imported."""
        if self.package and find_spec(self.package) is None or not self.package and source is None:
            return None
        claims: Any = f"composer_plugins.conformance.{self.name.replace('-', '_')}_claims.suite"
        try:
            made: Suite = import_module(claims).suite(*([] if self.package else [source]))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # transformers raises a RuntimeError
            raise ConfigError(
                self.name, f"it cannot be imported ({in_a_line(error)})", self.remedy
            ) from error
        return made


# PRIME-RL is the last: packages that it imports and that are not installed are replaced by empty modules.
KNOWN = (
    Framework("trl", "TRL", "TRL is not installed", "pip install 'composer-plugins[trl]'", "trl"),
    Framework("verl", "verl", "verl is not installed", "pip install 'composer-plugins[verl]'", "verl"),
    Framework("prime-rl", "PRIME-RL", "no checkout of PRIME-RL is given", CLONE),
)
FRAMEWORKS = {one.name: one for one in KNOWN}
