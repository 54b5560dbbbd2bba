"""verl's worker, which also returns the largest entries of the teacher's distributions, for the hint channel.

An engine passes its logits only to a loss function, and verl gives the reference policy none.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    ROW,
    TEACHER,
    TEACHER_PROMPT,
    TOP_DTYPES,
    TOP_K,
    nested,
    response_positions,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.logits import top_k
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, batch_row


class TopKTrainingWorker(TrainingWorker):
    """verl's worker of one model, which can score responses after the teacher's prompts."""

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Return verl's output; for a call with TOP_K, the teacher's fields of each response instead.

        verl writes what a worker returns under the keys of the rows, so none of it passes through the driver.
        """
        top_k = tensordict_utils.get_non_tensor_data(data, TOP_K, None)
        if top_k is None:
            return super().infer_batch(data)
        entries, training_loss = TopK(top_k), self.loss_fn
        self.loss_fn: Any = entries
        try:
            output = super().infer_batch(with_teacher_prompts(data))
        finally:
            self.loss_fn = training_loss
        if output is None:  # another rank returns it
            return output
        pairs = zip(rows_of(output.pop("log_probs")), rows_of(data["responses"]), strict=True)
        output[TEACHER] = nested([row[-len(ids) - 1 : -1].float() for row, ids in pairs])
        for i, name in enumerate(TOP_DTYPES):
            output[name] = nested([entries.rows[row][i] for row in range(len(entries.rows))])
        return output


class TopKLogprobsWorker(ActorRolloutRefWorker):
    """verl's worker of actor, rollout and reference with models that return their largest entries."""

    actor_worker_cls = TopKTrainingWorker
    ref_worker_cls = TopKTrainingWorker


class TopK:
    """In place of a loss function, keep each response token's k largest log-probabilities and their ids.

    An engine returns one number per token, so they are kept in `rows`, by the number of the row.
    """

    def __init__(self, k: int) -> None:
        self.k, self.rows = k, dict[int, list[Tensor]]()

    def __call__(self, data: TensorDict, student_logits: Tensor | None = None, **_: Any) -> Any:
        if student_logits is None:
            return torch.zeros(()), {}
        for row, positions in zip(data[ROW].tolist(), response_positions(data, student_logits), strict=True):
            found = top_k(student_logits, positions, self.k)
            self.rows[row] = [x.to("cpu", d) for x, d in zip(found, TOP_DTYPES.values(), strict=True)]
        return {}


def with_teacher_prompts(data: TensorDict) -> TensorDict:
    """Return the rows with the teacher's prompt in place of the policy's, numbered."""
    pairs = zip(rows_of(data[TEACHER_PROMPT]), rows_of(data["responses"]), strict=True)
    rows = [batch_row(PromptResponse(*pair)) for pair in pairs]
    fields = {name: nested([row[name] for row in rows]) for name in rows[0]}
    return data.copy().update({**fields, ROW: torch.arange(len(rows))})
