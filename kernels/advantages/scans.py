"""Recurrences over tokens, from the last to the first, in log2(tokens) vectorised steps."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Tokens = Float[Tensor, "*batch tokens"]


def reverse_scan(x: Tokens, decay: Tokens) -> Tokens:
    """y_t = x_t + decay_t y_(t+1), with y = 0 after the last token.

    Doubling: after k steps y_t holds the terms of the next 2^k tokens and decay_t their product. Unlike a
    ratio of cumulative products, nothing is ever divided by a power of the discount that underflowed.
    """
    decay, step = decay.to(x.dtype), 1
    while step < x.shape[-1]:
        x = x + decay * _ahead(x, step)
        decay = decay * _ahead(decay, step)
        step *= 2
    return x


def next_live(x: Tokens, mask: Bool[Tensor, "*batch tokens"]) -> Tokens:
    """Of every token, `x` at the next live one, 0 where there is none; `x` is 0 where `mask` is False."""
    return _ahead(reverse_scan(x, (~mask).to(x.dtype)), 1)


def _ahead(x: Tokens, step: int) -> Tokens:
    """x_(t + step), 0 beyond the end."""
    return torch.nn.functional.pad(x[..., step:], (0, step))
