"""Run under `accelerate launch`: the gradient of one step, per channel, into a file."""

import sys
from typing import Any

import torch

from parity_tests.support import tiny

CHANNELS: dict[str, dict[str, Any]] = {
    "policy": {},
    "our policy": {"policy": "grpo"},
    "hint": {"policy_weight": 0.0, "hint_weight": 1.0},
    "replay": {"policy_weight": 0.0, "replay_weight": 1.0},
    "all": {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3},
}


def first_gradients(loss_type: str, ranks: int) -> dict[str, torch.Tensor]:
    """The gradient of the first step of every channel, on 16 rows shared among `ranks`."""
    options = {"loss_type": loss_type, "per_device_train_batch_size": 16 // ranks}
    return {name: tiny.gradients(tiny.trainer(**channel, **options))[0] for name, channel in CHANNELS.items()}


if __name__ == "__main__":
    from accelerate import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    found = {loss_type: first_gradients(loss_type, state.num_processes) for loss_type in sys.argv[2:]}
    if state.is_main_process:
        torch.save({"ranks": state.num_processes, "gradients": found}, sys.argv[1])
    state.destroy_process_group()
