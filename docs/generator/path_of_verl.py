"""A drawn batch through verl's `ppo_loss`, with a config that `migrate` wrote."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import nested
from docs.generator.drawn import Batch


def value_and_gradient(table: Mapping[str, Any], batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of verl's `ppo_loss`, which calls its registry, with this config, and its gradient."""
    actor = dict(table["actor_rollout_ref"]["actor"])
    worker = dict(actor.pop("policy_loss", {}))
    if worker.pop("_target_", None):
        node = table["algorithm"]["composer"]
        policy_loss: PolicyLossConfig = ComposerPolicyLossConfig(**worker | {"composer": node})
    else:
        policy_loss = PolicyLossConfig(**worker)
    sizes = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = ActorConfig(policy_loss=policy_loss, **sizes, **actor)
    bypass = table.get("algorithm", {}).get("rollout_correction", {}).get("bypass_mode")
    lengths = [int(row.nonzero().max()) + 1 for row in batch.mask]  # verl has no padding here
    rows = [slice(0, n) for n in lengths]

    def ragged(x: Tensor) -> list[Tensor]:
        return [x[i, cut].contiguous() for i, cut in enumerate(rows)]

    ids = [torch.zeros(n, dtype=torch.long) for n in lengths]
    fields = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * len(rows),
        "responses": ids,
        "response_mask": [one.long() for one in ragged(batch.mask)],
        "old_log_probs": ragged(batch.rollout if bypass else batch.old),
        "ref_log_prob": ragged(batch.reference),
        "advantages": ragged(batch.advantages),
    }
    data = TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=len(rows))
    tokens = int(batch.mask.sum())
    counts = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": len(rows)}
    tensordict_utils.assign_non_tensor(data, **counts)
    logprobs = batch.logprobs.clone().requires_grad_()
    # verl's model gives one number per token of prompt and response; the last one belongs to no token.
    packed = [torch.cat([logprobs[i, cut], logprobs.new_zeros(1)]) for i, cut in enumerate(rows)]
    offsets = torch.tensor([0, *(n + 1 for n in lengths)]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(packed), offsets)}
    loss, _ = ppo_loss(config, output, data)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]
