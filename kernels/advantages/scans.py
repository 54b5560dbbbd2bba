"""Recurrences over tokens, from the last to the first, in log2(tokens) vectorised steps."""

import torch
from torch.fx import Proxy

from composer_plugins.kernels.types import Mask, Tokens

# A traced graph does not know how long its rows are: it has the steps for this many doublings.
TRACED_DOUBLINGS = 17  # 131,072 tokens


def reverse_scan(x: Tokens, decay: Tokens) -> Tokens:
    """y_t = x_t + decay_t y_(t+1), with y = 0 after the last token.

    Doubling: after k steps y_t holds the terms of the next 2^k tokens and decay_t their product. Unlike a
    ratio of cumulative products, nothing is divided by a power of the discount that underflowed.
    """
    if isinstance(x, Proxy):
        return _traced_scan(x, decay)
    decay, step = decay.to(x.dtype), 1
    while step < x.shape[-1]:
        x = x + decay * _ahead(x, step)
        decay = decay * _ahead(decay, step)
        step *= 2
    return x


def _traced_scan(x: Tokens, decay: Tokens) -> Tokens:
    """`reverse_scan` while torch.fx traces it, in as many steps as 2^17 tokens need, all of them torch's."""
    for step in (2**i for i in range(TRACED_DOUBLINGS)):
        ahead, decay_ahead = (torch.nn.functional.pad(one, (0, step))[..., step:] for one in (x, decay))
        x, decay = x + decay * ahead, decay * decay_ahead
    return x


def next_unmasked(x: Tokens, mask: Mask) -> Tokens:
    """For every token, `x` at the next unmasked one, 0 where there is none; `x` must be 0 where masked."""
    return _ahead(reverse_scan(x, (~mask).to(x.dtype)), 1)


def _ahead(x: Tokens, step: int) -> Tokens:
    """x_(t + step), 0 beyond the end."""
    return torch.nn.functional.pad(x[..., step:], (0, step))
