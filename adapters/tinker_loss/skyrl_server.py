"""The gradient of a loss on SkyRL's Tinker-compatible server, whose JAX backend divides it once more.

`forward_backward_custom` sends the weights w = -dL/dlogp with the server's cross_entropy. SkyRL 0.3.0 has
three backends. `fsdp` and `megatron` (`skyrl_train/utils/ppo_utils.py`, cross_entropy_loss) add up
-w_t logp_t over all tokens, micro-batches and ranks, so the gradient is the gradient of L. `jax` (`jax.py`,
loss_for_lora) divides the sum of each sequence by max(sum_t w_t, 1e-9), and the optimizer's gradient by the
number of sequences of the step. So the first divisor scales every sequence to the same size, and one whose
weights sum to less than 0 by 1e9. Its importance_sampling divides by the number of tokens, which can be
undone: at the current log-probabilities its ratio is 1, and its gradient the advantage.
"""

from collections.abc import Sequence
from typing import Any

import torch

from composer_plugins.adapters.tinker_loss.upstream import Call, inputs_apart, with_entries
from composer_plugins.errors import unknown

# By backend of the server, the loss whose gradient it does not falsify.
SURROGATES = {"jax": "importance_sampling", "fsdp": "cross_entropy", "megatron": "cross_entropy"}


def forward_backward_on_skyrl(
    training_client: Any, data: Sequence[Any], loss: Call, *, backend: str, data_of_step: int | None = None
) -> dict[str, float]:
    """Add the gradient of `loss` to the step, as `forward_backward_custom` should; return its metrics.

    `backend` is the server's `--backend`: "jax", "fsdp" or "megatron". `data_of_step` is the number of data
    of all calls before the `optim_step`, by which "jax" divides; None: the data of this call.
    """
    if backend not in SURROGATES:
        raise unknown("backend", str(backend), SURROGATES, guess=False)
    bare, apart = inputs_apart(data, loss)
    outputs = training_client.forward(bare, "cross_entropy").result().loss_fn_outputs
    logprobs = [torch.tensor(one["logprobs"].data).requires_grad_() for one in outputs]
    value, metrics = apart(bare, logprobs)
    sent, rows = [], len(data) if data_of_step is None else data_of_step
    for one, logprob, slope in zip(bare, logprobs, torch.autograd.grad(value, logprobs), strict=True):
        entries = {"weights": -slope}
        if backend == "jax":
            advantages = -slope * (len(slope) * rows)
            entries = {
                "logprobs": logprob.detach(),
                "weights": torch.ones_like(slope),
                "advantages": advantages,
            }
        sent.append(with_entries(one, entries))
    training_client.forward_backward(sent, SURROGATES[backend]).result()
    return metrics
