"""Trainer classes behind the mixin, and the channels that do not work with each (docs/trl_options.md)."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from transformers import Trainer
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from composer_plugins.adapters.trl_mixin import ComposerLossMixin
from composer_plugins.errors import ConfigError
from parity_tests.rigs import tiny

CHANNELS: dict[str, dict[str, Any]] = {
    '`policy="trl"`': {},
    "a policy of ours": {"policy": "grpo"},
    "hint": {"hint_weight": 0.7},
    "replay": {"replay_weight": 0.3},
}


class Scaled(GRPOTrainer):
    """Changes what `super()._compute_loss` returns."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return 2 * super()._compute_loss(model, inputs)


def _forward(self: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The log-probabilities of TRL's own forward pass."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    kept = inputs["completion_ids"].shape[1]
    logprobs: torch.Tensor = self._get_per_token_logps_and_entropies(model, ids, attention, kept)[0]
    return logprobs


class Extra(GRPOTrainer):
    """Adds a term that the advantages do not enter, and calls another model for it."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            other = _forward(self, lambda **tensors: model(**tensors), inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logits = model(input_ids=ids).logits
        extra = (logits.logsumexp(-1) ** 2).mean() * other.mean()
        return super()._compute_loss(model, inputs) + 0.1 * extra


class Reinforce(GRPOTrainer):
    """Computes a policy loss of its own."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        logprobs = _forward(self, model, inputs)
        return -(inputs["advantages"][:, None] * logprobs * inputs["completion_mask"]).sum(1).mean()


class OwnForward(GRPOTrainer):
    """Computes its loss from a forward pass of its own."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        chosen = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        chosen = chosen[:, -inputs["completion_ids"].shape[1] :] * inputs["completion_mask"]
        return -(inputs["advantages"][:, None] * chosen).sum(1).mean()


class Bypassing(GRPOTrainer):
    """Computes its loss in `compute_loss`."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        return OwnForward._compute_loss(self, model, inputs)  # type: ignore[arg-type]


class Row(NamedTuple):
    """A trainer class of the table."""

    title: str
    trainer: type
    refused: tuple[str, ...] = ()  # channels


OURS, HINT, REPLAY = list(CHANNELS)[1:]
YOURS = "your subclass of it whose `_compute_loss` "
ROWS = (
    Row("`GRPOTrainer`", GRPOTrainer),
    Row(f"{YOURS}scales what `super()._compute_loss` returns", Scaled),
    Row(f"{YOURS}adds a term to it, without the advantages", Extra),
    Row(f"{YOURS}computes a policy loss of its own from `_get_per_token_logps_and_entropies`", Reinforce),
    Row(f"{YOURS}calls neither of them", OwnForward, (OURS, HINT)),
    Row(
        "your subclass of it whose `compute_loss` does not call `_compute_loss`",
        Bypassing,
        (OURS, HINT, REPLAY),
    ),
    Row("`trl.experimental.gmpo.GMPOTrainer`", GMPOTrainer),
)


def other_trainers() -> dict[str, type]:
    """The trainer classes in the source of the installed TRL that are not in ROWS."""
    known, root = {row.trainer.__name__ for row in ROWS}, Path(trl.__file__).parent
    found = dict[str, type]()
    for path in sorted(root.rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*Trainer)\b", path.read_text(), re.MULTILINE):
            if name not in known:
                module = ".".join(("trl", *path.relative_to(root).with_suffix("").parts))
                found[name] = getattr(importlib.import_module(module), name)
    assert all(issubclass(cls, Trainer) for cls in found.values())
    return found


def mixed(trainer: type) -> Any:
    """The trainer class with the mixin in front of it."""
    return type(f"My{trainer.__name__}", (ComposerLossMixin, trainer), {})


def error_of(trainer: type, options: dict[str, Any]) -> ConfigError | None:
    """The error of the class, of its construction or of its first step; None if there is none."""
    try:
        tiny.gradients(tiny.trainer(mixed(trainer), **options))
    except ConfigError as error:
        return error
    return None


@cache
def refusal(row: Row, channel: str) -> ConfigError:
    """The error of a channel that does not work."""
    error = error_of(row.trainer, CHANNELS[channel])
    assert error is not None
    return error
