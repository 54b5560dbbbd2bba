"""What an adapter declares of its framework, and the refusal of a loss that the framework cannot run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from composer_plugins.losses.row import Kind, Loss

if TYPE_CHECKING:  # the registry, to which a choice belongs, imports this module
    from composer_plugins.losses.choosing import Choice
from composer_plugins.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One framework, as far as the catalogue needs to know it."""

    framework: str
    path: str  # "module:object", what a user imports
    summary: str
    provides: Mapping[Kind, frozenset[str]]  # by kind of loss, the inputs it can be called with
    # By kind, why a statistic of the whole batch is not available: "TRL cuts the batch into micro-batches".
    partial_batch: Mapping[Kind, str] = field(default_factory=dict)

    def missing(self, loss: Loss) -> list[str]:
        """The inputs of `loss` that this framework does not have; all of them for a kind it never runs."""
        return [need for need in loss.needs if need not in self.provides.get(loss.kind, frozenset())]

    def runs(self, loss: Loss) -> bool:
        """Whether this framework has every input of `loss`, and the whole batch if the loss needs it."""
        return loss.kind in self.provides and not self.missing(loss) and not loss.over_batch

    def require(self, choice: "Choice") -> None:
        """Raise ConfigError, at the option that names the loss, unless this framework can run it."""
        loss, listed = choice.loss, f"composer-plugins list --framework {self.framework} --kind "
        remedy = f"choose another: {listed}{loss.kind} shows those that run here"
        over_weights = choice.params.get("normalise") and loss.kind in self.partial_batch
        if loss.over_batch or over_weights:
            why = self.partial_batch.get(loss.kind, "the loss would change with the size of a micro-batch")
            what = (
                f"{choice.name!r}{' with normalise' * bool(over_weights)} is a statistic of the whole batch"
            )
            raise ConfigError(choice.option, f"{what}, and {why}", remedy)
        if missing := self.missing(loss):
            available = ", ".join(sorted(self.provides.get(loss.kind, frozenset()))) or "none"
            problem = f"{choice.name!r} needs {', '.join(missing)}, which {self.framework} does not provide"
            raise ConfigError(choice.option, f"{problem} (inputs here: {available})", remedy)
