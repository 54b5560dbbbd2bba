"""A sampler for `trainer.v1.sampler.custom_sampler`: verl's own, with its rows in a fixed order."""

from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Ordered(ReplayBuffer):
    """Rows sorted by their tokens. verl's order is that of arrival, which changes sums by a rounding."""

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """verl's batch, sorted by prompt and response."""
        batch, metrics = super().sample(*args, **kwargs)
        fields = ["prompts", "responses"]
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        rows = list(zip(*(data[field].unbind() for field in fields), strict=True))
        texts = [(prompt.tolist(), response.tolist()) for prompt, response in rows]
        batch.reorder(sorted(range(len(texts)), key=texts.__getitem__))
        return batch, metrics
