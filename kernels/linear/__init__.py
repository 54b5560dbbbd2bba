"""Losses on hidden states and an output head, without a tensor of [tokens, vocab].

The logits of a language model are `cap(scale * (hidden @ weight.T + bias)) / temperature`, where `cap` is
softcap * tanh(x / softcap) if there is a softcap. They are computed one tile at a time, in float32 at least.
"""

from composer_plugins.kernels.linear.divergence import divergence
from composer_plugins.kernels.linear.log_probs import log_probs
from composer_plugins.kernels.linear.top_k import top_k

__all__ = ["divergence", "log_probs", "top_k"]
