"""verl's own distillation beside a loss of ours: when verl sets it to 0, and what the doctor says."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import DistillationConfig, DistillationLossConfig

from composer_plugins.frameworks.verl import Key
from parity_tests.cases.verl_config import DAPO, DISTILLATION, OURS, distilled, judged, tree
from parity_tests.rigs.verl_actor import composer_actor

KINDS = [(rewards, gradient) for rewards in (True, False) for gradient in (True, False)]


def gradient(advantage: float, **options: bool) -> tuple[Tensor, dict[str, Any]]:
    """The gradient of the loss that verl's workers have beside a distillation, and its metrics."""
    config = composer_actor({"policy": "dapo"}, loss_agg_mode="token-mean")
    logprobs = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)

    def nested(*values: float) -> Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(values)], layout=torch.jagged)

    fields = {"prompts": nested(1), "responses": nested(1, 2, 3), "input_ids": nested(1, 1, 2, 3)}
    fields |= {"response_mask": nested(1, 1, 1), "old_log_probs": nested(-1.0, -2.0, -0.5)}
    fields |= {"advantages": nested(*[advantage] * 3), "teacher_logprobs": nested(-0.5, -1.0, -1.0, -2.0)}
    data = TensorDict(fields, batch_size=1)
    assign_non_tensor(data, dp_size=1, batch_num_tokens=3, global_batch_size=1)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, torch.tensor([0, 4]))}
    distillation = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode="k3", **options))
    loss, metrics = distillation_ppo_loss(config, distillation, output, data)
    return torch.autograd.grad(loss, logprobs)[0], metrics


@pytest.mark.parametrize(("use_task_rewards", "use_policy_gradient"), KINDS)
def test_the_doctor_names_the_distillation_in_which_our_loss_trains_nothing(
    use_task_rewards: bool, use_policy_gradient: bool
) -> None:
    options = {"use_task_rewards": use_task_rewards, "use_policy_gradient": use_policy_gradient}
    (one, metrics), (other, _) = gradient(1.0, **options), gradient(-2.0, **options)
    is_inert = torch.equal(one, other)
    logged = any(name.startswith("actor/composer/") for name in metrics)
    assert is_inert is not use_task_rewards and logged is (use_task_rewards or use_policy_gradient)
    found = judged(tree(OURS | DAPO | {DISTILLATION: True} | distilled(**options)))
    assert [one.key for one in found] == [Key.TASK_REWARDS] * is_inert
