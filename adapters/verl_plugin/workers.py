"""verl's worker, when a hint compares distributions: asked with `composer_top_k`, it answers with them.

verl's own gives the reference policy no loss function, and it is through that function alone that an
engine shows its logits.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from composer_plugins.adapters.verl_parts.fields import TOP_IDS, TOP_K, TOP_LOGPROBS

PLANE = "composer_plane"  # what an engine takes of its logits is a number per token: k planes, twice


class Answering(TrainingWorker):
    """A model's worker that hands over the largest entries of its distributions, if asked to."""

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """verl's, with `TOP_LOGPROBS` and `TOP_IDS` of every token beside the log-probabilities."""
        top_k = tensordict_utils.get_non_tensor_data(data, TOP_K, None)
        if top_k is None:
            return super().infer_batch(data)
        trained_by: Any = self.loss_fn
        self.loss_fn: Any = TopK(top_k)
        try:
            output = super().infer_batch(data)
        finally:
            self.loss_fn = trained_by
        return output if output is None else stacked(output, top_k)


class AnsweringWorker(ActorRolloutRefWorker):
    """verl's worker of actor, rollout and reference, whose models answer."""

    actor_worker_cls = Answering
    ref_worker_cls = Answering


class TopK:
    """In a loss function's place: the k largest log-probabilities of each token and what they are of."""

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


def stacked(output: TensorDict, k: int) -> TensorDict:
    """The planes as two fields [rows, tokens, k]."""
    for name, field in (("logprob", TOP_LOGPROBS), ("id", TOP_IDS)):
        planes = [output.pop(f"{PLANE}_{name}_{i}") for i in range(k)]
        values = torch.stack([plane.values() for plane in planes], -1)
        output[field] = torch.nested.nested_tensor_from_jagged(values, planes[0].offsets())
    return output
