"""Losses moved to verl: its `ppo_loss` has the value and the gradient of the formula."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import nested
from parity_tests.rigs.moved_losses import Batch, assert_trains, batch, every, expected, moved


def value_and_gradient(table: Mapping[str, Any], given: Batch) -> tuple[Tensor, Tensor]:
    """The loss of `ppo_loss`, which calls verl's registry, with a config that `migrate` wrote."""
    actor = dict(table["actor_rollout_ref"]["actor"])
    own = {key: value for key, value in actor.pop("policy_loss").items() if key != "_target_"}
    policy_loss = ComposerPolicyLossConfig(**own | {"composer": table["algorithm"]["composer"]})
    sizes = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = ActorConfig(policy_loss=policy_loss, **sizes, **actor)
    bypass = table["algorithm"].get("rollout_correction", {}).get("bypass_mode")
    rows = [slice(0, int(row.nonzero().max()) + 1) for row in given.mask]  # verl has no padding here

    def ragged(x: Tensor) -> list[Tensor]:
        return [x[i, cut].contiguous() for i, cut in enumerate(rows)]

    mask = [one.long() for one in ragged(given.mask)]
    fields = {
        "prompts": [torch.zeros(1, dtype=torch.long)] * len(rows),
        "responses": [torch.zeros_like(one) for one in mask],
        "response_mask": mask,
        "old_log_probs": ragged(given.rollout if bypass else given.old),
        "advantages": ragged(given.advantages),
    }
    data = TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=len(rows))
    counts = {"dp_size": 1, "batch_num_tokens": int(given.mask.sum()), "global_batch_size": len(rows)}
    tensordict_utils.assign_non_tensor(data, **counts)
    logprobs = given.logprobs.clone().requires_grad_()
    # verl's model gives one number per token of prompt and response; the last one belongs to no token.
    packed = [torch.cat([logprobs[i, cut], logprobs.new_zeros(1)]) for i, cut in enumerate(rows)]
    offsets = torch.tensor([0, *(len(one) for one in packed)]).cumsum(0)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(packed), offsets)}
    loss, _ = ppo_loss(config, output, data)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.filterwarnings("ignore:.*is reduced by")
@pytest.mark.parametrize("name", every("verl"))
def test_verl_trains_what_was_written(name: str) -> None:
    for written, objective in moved("verl", name):
        given = batch(nan=True)
        assert_trains(*value_and_gradient(written.table, given), expected(objective, given))
