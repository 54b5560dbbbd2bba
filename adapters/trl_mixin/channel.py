"""`Channel`: what the three channels share, the call of the chosen loss and its metrics."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.catalogue import Choice
from composer_plugins.kernels.types import Metric


@dataclass
class Channel:
    """One term of the composer loss."""

    name: ClassVar[str]

    choice: Choice
    denominator: str = field(init=False)  # in words
    _checked: bool = field(default=False, init=False)

    def call(self, tensors: dict[str, Tensor]) -> Any:
        """Call the chosen loss. The tensors of the first batch are checked."""
        result = self.choice.call(tensors, check=not self._checked)
        self._checked = True
        return result

    def log(
        self, trainer: GRPOTrainer, loss: Tensor, metrics: dict[str, Metric], where: Tensor | None = None
    ) -> None:
        """Log the loss, and the mean of each metric over the unmasked elements of all ranks.

        `where` masks further elements out. A metric without any element is left out of this step. All ranks
        must pass the same names: one reduction carries every value.
        """
        parts = {"loss": (loss.detach(), torch.ones_like(loss, dtype=torch.bool))}
        for name, metric in metrics.items():
            parts[name] = (metric.value, metric.where if where is None else metric.where & where)
        sums = [torch.where(where, value, 0.0).sum().float() for value, where in parts.values()]
        counts = [where.sum().float() for _, where in parts.values()]
        totals = trainer.accelerator.reduce(torch.stack([*sums, *counts]), reduction="sum").tolist()
        for name, total, count in zip(parts, totals, totals[len(parts) :], strict=False):
            if count:
                upstream.metrics(trainer)[f"composer/{self.name}/{name}"].append(total / count)

    def describe(self) -> str:
        """The loss, its parameters and its denominator."""
        values = {name: self.choice.value(name) for name in self.choice.loss.parameters}
        parameters = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        return f"{self.name} {self.choice.name}({parameters}), {self.denominator}"
