"""Distillation divergences between a student S and a teacher T, per token, in nats.

Full-vocabulary forms take logits [*batch, tokens, vocab] of both, may be cut to the top k of either (see
`supports`), and sum `summands`. Forms named `_topk` take what a teacher's server returns. The sampled-token
form takes the two log-probabilities of the token that was drawn. Softmax runs in float32 at least.
Gradients flow into the student only. 0 log 0 = 0, so a vocabulary entry that is -inf on both sides
contributes nothing. An entry with T_v > 0 and S_v = 0 makes KL(T || S) infinite, and one with
S_v > 0 and T_v = 0 makes KL(S || T) infinite.

`temperature` divides both logits; there is no temperature^2 factor. Reduce with `aggregation.aggregate`,
by default "token-mean".
"""

from composer_plugins.kernels.divergences.full import *  # noqa: F403
from composer_plugins.kernels.divergences.gated import *  # noqa: F403
from composer_plugins.kernels.divergences.sampled import *  # noqa: F403
from composer_plugins.kernels.divergences.shaped import *  # noqa: F403
from composer_plugins.kernels.divergences.skewed import *  # noqa: F403
from composer_plugins.kernels.divergences.topk import *  # noqa: F403
