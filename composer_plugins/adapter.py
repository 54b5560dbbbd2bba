"""An adapter's row: which framework it serves, and what it can feed each kind of loss with."""

from collections.abc import Mapping
from dataclasses import dataclass

from composer_plugins.catalogue import Kind, Loss


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One framework, as far as the catalogue needs to know it."""

    framework: str
    path: str  # "module:object", what a user imports
    summary: str
    provides: Mapping[Kind, frozenset[str]]  # by kind of loss, the inputs it can be fed with

    def missing(self, loss: Loss) -> list[str]:
        """The inputs of `loss` that this framework cannot feed; all of them for a kind it never runs."""
        return [need for need in loss.needs if need not in self.provides.get(loss.kind, frozenset())]

    def runs(self, loss: Loss) -> bool:
        """Whether this framework can feed `loss`, and does not cut the batch if it needs the whole."""
        return loss.kind in self.provides and not self.missing(loss) and not loss.over_batch
