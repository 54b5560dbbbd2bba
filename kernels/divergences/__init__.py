"""Distillation divergences between a student S and a teacher T, per token, in nats.

Full-vocabulary forms take logits [*batch, tokens, vocab] of both, may be cut to the top k of either (see
`supports`), and sum `summands`; forms named `_topk` take what a teacher's server returns, and the
sampled-token form the two log-probabilities of the token that was drawn. Softmax runs in float32 at
least. Gradients flow into the student only. 0 log 0 = 0, so a vocabulary entry that is -inf on both sides
contributes nothing; one with T_v > 0 and S_v = 0 makes KL(T || S) infinite, and one with
S_v > 0 and T_v = 0 makes KL(S || T) infinite.

`temperature` divides both logits; there is no temperature^2 factor. Reduce with `aggregation.aggregate`,
by default "token-mean".
"""

from composer_plugins.kernels.divergences.full import forward_kl, jsd, reverse_kl
from composer_plugins.kernels.divergences.gated import entropy_gated_kl
from composer_plugins.kernels.divergences.sampled import importance_weight, sampled_token, sdpo
from composer_plugins.kernels.divergences.skewed import (
    adaptive_kl,
    skewed_forward_kl,
    skewed_reverse_kl,
    symmetric_kl,
    tv,
)
from composer_plugins.kernels.divergences.topk import forward_kl_topk, reverse_kl_topk

__all__ = [
    "adaptive_kl",
    "entropy_gated_kl",
    "forward_kl",
    "forward_kl_topk",
    "importance_weight",
    "jsd",
    "reverse_kl",
    "reverse_kl_topk",
    "sampled_token",
    "sdpo",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "symmetric_kl",
    "tv",
]
