"""verl's worker, which also returns the largest entries of a model's distributions, for the hint channel.

An engine passes its logits only to a loss function, and verl gives the reference policy none.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import TOP_IDS, TOP_K, TOP_LOGPROBS

PLANE = "composer_plane"  # an engine returns one number per token, so k values and k ids are 2k planes


class TopKTrainingWorker(TrainingWorker):
    """verl's worker of one model, which can return the largest entries of its distributions."""

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Return verl's output; for a call with TOP_K also `TOP_LOGPROBS` and `TOP_IDS` of every token."""
        top_k = tensordict_utils.get_non_tensor_data(data, TOP_K, None)
        if top_k is None:
            return super().infer_batch(data)
        training_loss: Any = self.loss_fn
        self.loss_fn: Any = TopK(top_k)
        try:
            output = super().infer_batch(data)
        finally:
            self.loss_fn = training_loss
        return output if output is None else stack_planes(output, top_k)


class TopKLogprobsWorker(ActorRolloutRefWorker):
    """verl's worker of actor, rollout and reference with models that return their largest entries."""

    actor_worker_cls = TopKTrainingWorker
    ref_worker_cls = TopKTrainingWorker


class TopK:
    """In place of a loss function, return the k largest log-probabilities of each token and their ids."""

    def __init__(self, k: int) -> None:
        self.k = k

    def __call__(self, student_logits: Tensor | None = None, **_: Any) -> Any:
        if student_logits is None:
            return torch.zeros(()), {}
        found = torch.log_softmax(student_logits.float(), -1).topk(self.k, -1)
        planes = zip(found.values.unbind(-1), found.indices.unbind(-1), strict=True)
        return {
            f"{PLANE}_{name}_{i}": plane
            for i, pair in enumerate(planes)
            for name, plane in zip(("logprob", "id"), pair, strict=True)
        }


def stack_planes(output: TensorDict, k: int) -> TensorDict:
    """Replace the planes by two fields [rows, tokens, k]."""
    for name, field in (("logprob", TOP_LOGPROBS), ("id", TOP_IDS)):
        planes = [output.pop(f"{PLANE}_{name}_{i}") for i in range(k)]
        values = torch.stack([plane.values() for plane in planes], -1)
        output[field] = torch.nested.nested_tensor_from_jagged(values, planes[0].offsets())
    return output
