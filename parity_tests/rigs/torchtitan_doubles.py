"""torchtitan's contract for a loss of RL: doubles of what a loss imports of it, and how it is called.

Written from the contract that torchtitan 0.3.0 and b5bcd76 document: `Configurable` with a nested `Config`
and its `build`, `BaseLoss`, and `compute_logprobs` for [B, L, V] (0.3.0) and [T, V] (b5bcd76). The session
`torchtitan` runs the same tests with torchtitan itself.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

ADAPTER = "composer_plugins.adapters.torchtitan_loss.loss"
IS_INSTALLED = find_spec("torchtitan") is not None
Batch = dict[str, Tensor]


class BaseLoss:
    """A loss with a nested Config, whose `build` makes the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The config of a loss."""

        _owner: ClassVar[Any] = None

        def build(self, **given: Any) -> Any:
            """The loss of this config."""
            return self._owner(config=replace(self), **given)

    def __init_subclass__(cls) -> None:
        if "__slots__" not in vars(cls.Config):
            raise TypeError(f"{cls.__name__}.Config must use @dataclass(kw_only=True, slots=True)")
        cls.Config._owner = cls


def compute_logprobs(logits: Tensor, labels: Tensor, *, return_entropy: bool = False) -> Any:
    """Log-probabilities and entropies of the labels, in float32."""
    every = logits.float().log_softmax(-1)
    logprobs = every.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropies = -(every.exp() * every).detach().sum(-1)
    return (logprobs, entropies) if return_entropy else logprobs


@contextmanager
def adapter() -> Iterator[Any]:
    """Our module with `ComposerLoss`, on the installed torchtitan, or on the doubles."""
    with pytest.MonkeyPatch.context() as patch:
        if not IS_INSTALLED:
            for name in ("torchtitan", "torchtitan.components", "torchtitan.components.loss"):
                module = ModuleType(name)
                vars(module).update(BaseLoss=BaseLoss, compute_logprobs=compute_logprobs)
                patch.setitem(sys.modules, name, module)
            patch.delitem(sys.modules, ADAPTER, raising=False)
        yield import_module(ADAPTER)
        if not IS_INSTALLED:
            del sys.modules[ADAPTER]


def packed(seed: int = 0, rows: int = 4, tokens: int = 12, vocabulary: int = 7) -> dict[str, Tensor]:
    """A packed micro-batch [B, L] as torchtitan's batcher makes it, two samples in a row, padding at its end.

    The generator's log-probability of one response token is not finite.
    """
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, tokens, vocabulary, generator=g)
    labels = torch.randint(0, vocabulary, (rows, tokens), generator=g)
    logprobs = compute_logprobs(logits, labels)
    # log ratios of 0.4 around a gap that the clip does not reach, and some that it does
    generator = (logprobs + 0.4 * torch.randn(rows, tokens, generator=g)).clamp(max=0)
    place = torch.arange(tokens)
    loss_mask = ((place % 6) >= 2) & (place < tokens - 1)
    loss_mask = loss_mask.expand(rows, tokens).clone()
    loss_mask[-1] = False  # a row of padding
    advantages = torch.randn(rows, 2, generator=g).repeat_interleave(tokens // 2, 1)
    generator[0, 3] = torch.nan
    return {
        "logits": logits,
        "labels": labels,
        "generator_logprobs": torch.where(loss_mask, generator, 0.0),
        "advantages": torch.where(loss_mask, advantages, 0.0),
        "loss_mask": loss_mask,
    }


def flat(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The micro-batch in the layout of b5bcd76: [T, V] and [T]."""
    return {name: x.flatten(0, 1) for name, x in batch.items()}


def valid_tokens(batch: dict[str, Tensor]) -> int:
    """The count that torchtitan's batcher passes: response tokens with a finite generator log-probability."""
    return int((batch["loss_mask"] & batch["generator_logprobs"].isfinite()).sum())


def make(loss_module: Any, **fields: Any) -> Any:
    """The loss of a config with these fields."""
    return loss_module.ComposerLoss.Config(**fields).build()


def run(loss: Any, batch: Batch, tokens: int | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, its gradient in the logits, and the metrics."""
    given = {**batch, "logits": batch["logits"].clone().requires_grad_()}
    logits, labels = given.pop("logits"), given.pop("labels")
    value, metrics = loss(logits, labels, tokens, **given)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient, metrics
