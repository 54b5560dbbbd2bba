"""For `trainer.v1.sampler.custom_sampler`: verl's own, its rows in an order that no clock decides."""

from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Ordered(ReplayBuffer):
    """Rows by what they say. verl's come as they arrived, which a sum of floating-point numbers sees."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """verl's batch, sorted by prompt and response."""
        batch, metrics = super().sample(*args, **kwargs)
        fields = ["prompts", "responses"]
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        rows = list(zip(*(data[field].unbind() for field in fields), strict=True))
        said = [(prompt.tolist(), response.tolist()) for prompt, response in rows]
        batch.reorder(sorted(range(len(said)), key=said.__getitem__))
        return batch, metrics
