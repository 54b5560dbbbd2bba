"""Run under `accelerate launch`: the gradient of the first step of every case, into a file."""

import sys
import time
from typing import Any

import torch

from parity_tests.rigs import tiny

POLICIES = ("grpo", "gspo", "dr_grpo", "dapo", "cispo", "luspo", "importance_sampling")
CASES: dict[str, dict[str, Any]] = {
    "TRL's own": {},
    **{name: {"policy": name} for name in POLICIES},
    "hint": {"policy_weight": 0.0, "hint_weight": 1.0},
    "hint, ema": {"policy_weight": 0.0, "hint_weight": 1.0, "hint_teacher": "ema"},
    "hint, sampled token": {"policy_weight": 0.0, "hint_weight": 1.0, "hint_divergence": "sampled_token"},
    "hint, taid": {
        "policy_weight": 0.0,
        "hint_weight": 1.0,
        "hint_divergence": "taid",
        "hint_params": {"t": 0.5},
    },
    # One group on all ranks: a row's demonstration may be another rank's.
    "hint, successful rollout": {
        "policy_weight": 0.0,
        "hint_weight": 1.0,
        "hint_source": "successful_rollout",
        "success_reward_threshold": 0.8,
        "num_generations": 16,
        "include_environment_feedback": True,
        "reprompt_template": "{prompt}{solution}{feedback}",
        "solution_template": "[{successful_previous_attempt}]",
        "feedback_template": "_{feedback_raw}",
    },
    "replay": {"policy_weight": 0.0, "replay_weight": 1.0},
    "replay, simpo": {"policy_weight": 0.0, "replay_weight": 1.0, "replay_loss": "simpo"},
    "all": {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3},
}


def first_gradients(ranks: int) -> dict[str, torch.Tensor]:
    """The gradient of the first step of every case, on 16 rows shared among `ranks`."""
    size = 16 // ranks
    return {
        name: tiny.gradients(tiny.trainer(**case, per_device_train_batch_size=size))[0]
        for name, case in CASES.items()
    }


if __name__ == "__main__":
    from accelerate import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    found = first_gradients(state.num_processes)
    if state.is_main_process:
        torch.save({"ranks": state.num_processes, **found}, sys.argv[1])
    state.destroy_process_group()
    time.sleep(1)  # a process that ends while gloo's threads still release tensors may abort
