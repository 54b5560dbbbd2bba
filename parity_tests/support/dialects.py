"""How each upstream reduces a loss per token, in terms of our `aggregate`.

Where an upstream rounds or pads a denominator, its own way is spelled out here, so that the rest of a
comparison can be as strict as float64. Every such way is a row of `divergences.md`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.catalogue import Kind, choose
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.plugins import losses

VERL_LENGTH_EPS = 1e-8


def verl(
    token_loss: Tensor,
    mask: Tensor,
    mode: Mode,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """verl 0.9.1's agg_loss, which takes a row's length as n + 1e-8 and ranks as a factor."""
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(-1, keepdim=True).to(torch.float64)
        token_loss = token_loss * (lengths / (lengths + VERL_LENGTH_EPS))
    return dp_size * aggregate(
        token_loss,
        mask,
        mode,
        num_tokens=batch_num_tokens,
        num_sequences=global_batch_size,
        max_length=loss_scale_factor or mask.shape[-1],
    )


def stable_rl(token_loss: Tensor, mask: Tensor, mode: Mode) -> Tensor:
    """Stable-RL's agg_loss (an older verl's): "-norm" does not divide by the number of sequences."""
    if mode == "seq-mean-token-sum-norm":
        return aggregate(token_loss, mask, mode, num_sequences=1, max_length=mask.shape[-1])
    return verl(token_loss, mask, mode)


def trl(token_loss: Tensor, mask: Tensor, case: dict[str, Any]) -> Tensor:
    """TRL 1.16's loss_type, by its denominator; an empty row counts as a sequence."""
    rows, loss_type = mask.shape[0], case["kwargs"]["loss_type"]
    if loss_type in {"cispo", "dapo", "vespo"}:
        return aggregate(token_loss, mask, "token-mean", num_tokens=case["num_items_in_batch"])
    if loss_type == "bnpo":
        return aggregate(token_loss, mask, "token-mean")
    if loss_type in {"grpo", "sapo"}:
        return aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=rows)
    if loss_type == "luspo":
        return aggregate(token_loss, mask, "seq-mean-token-sum", num_sequences=rows)
    if loss_type == "dr_grpo":
        length = case["kwargs"]["max_completion_length"]
        mode = "seq-mean-token-sum-norm"
        return aggregate(token_loss, mask, mode, num_sequences=rows, max_length=length)
    raise ValueError(f"unknown loss_type {loss_type!r}")


def kernel(kind: Kind, name: str) -> Callable[..., Any]:
    """The kernel of a catalogue row, or of a dialect ("cispo@trl") with that dialect's parameters."""
    choice = choose(losses(), kind, name)
    return partial(choice.loss.kernel(), **choice.params)
