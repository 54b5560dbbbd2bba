"""What a step's rollouts show, in verl's trainer: there are the entropies and the sampler's numbers."""

from typing import Any

import torch
import transfer_queue
from transfer_queue import KVBatchMeta

from composer_plugins.health.watch import OURS, Health

NAMES = {
    "response_mask": "mask",
    "old_log_probs": "logprobs",  # of the weights that the step begins with
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantages",
    "entropy": "entropies",  # missing in bypass mode, where the old policy is the rollout engine's
}


def measure_step(health: Health, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
    """Measure the rows of a step, and add the metrics to verl's."""
    fields = {"keys": batch.keys, "partition_id": batch.partition_id, "select_fields": [*NAMES]}
    data = transfer_queue.kv_batch_get(**fields).to_padded_tensor()
    tensors = {ours: data[name] for name, ours in NAMES.items() if name in data}
    if {"mask", "entropies"} <= tensors.keys():
        tensors["mask"] = tensors["mask"].bool()
        with torch.no_grad():  # the driver's tensors have no graph
            found = health.micro_batch(tensors, equal=True)
        metrics |= {f"{OURS}{name}": float(value) for name, value in found.items()}
