"""What tier B adds to a row in verl's TransferQueue, and to a call of a worker: the names, in one place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Per response token.
TEACHER = "composer_teacher_logprobs"  # of the sampled token, under the teacher's prompt
HINT_MASK = "composer_hint_mask"  # 1 where the hint is learned
TOP_LOGPROBS = "composer_teacher_topk_logprobs"  # [tokens, k], the teacher's largest
TOP_IDS = "composer_teacher_topk_ids"
REPLAY = "composer_replay_coefficients"  # d loss / d log pi of each token of a replayed completion

PER_TOKEN = (TEACHER, HINT_MASK, TOP_LOGPROBS, TOP_IDS, REPLAY)

# Per call.
TOP_K = "composer_top_k"  # a worker is to hand over so many entries of each distribution
TAID_T = "composer_taid_t"
FROM_LOGITS = "distillation_use_topk"  # verl's: the loss function is shown the logits first


def rows_of(field: Any) -> list[Tensor]:
    """A per-token field's rows: TransferQueue nests them, unless all are as long."""
    return list(field.unbind())


def plain(values: Any) -> list[Any]:
    """A column of the data set as a list; verl wraps what is no tensor, and stacks numbers to one."""
    return [_bare(value) for value in values]


def _bare(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else getattr(value, "data", value)


def nested(rows: Sequence[Tensor]) -> Tensor:
    """Rows of different length as verl keeps them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
