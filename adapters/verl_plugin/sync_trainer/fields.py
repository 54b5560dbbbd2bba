"""The fields that composer_sync adds to a row in verl's TransferQueue, and to a call of a worker."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Per response token.
TEACHER = "composer_teacher_logprobs"  # of the sampled token, under the teacher's prompt
HINT_MASK = "composer_hint_mask"  # 1 where the hint's loss counts
TOP_LOGPROBS = "composer_teacher_topk_logprobs"  # [tokens, k], the teacher's largest
TOP_IDS = "composer_teacher_topk_ids"
REPLAY = "composer_replay_coefficients"  # d loss / d log pi of each token of a replayed completion

PER_TOKEN = (TEACHER, HINT_MASK, TOP_LOGPROBS, TOP_IDS, REPLAY)

# Per call.
TOP_K = "composer_top_k"  # the worker returns so many entries of each distribution
TAID_T = "composer_taid_t"


def rows_of(field: Any) -> list[Tensor]:
    """Return the rows of a per-token field, which TransferQueue nests unless all are equally long."""
    return list(field.unbind())


def column_values(values: Any) -> list[Any]:
    """Return a column of the data set as a list; verl wraps objects, and stacks numbers in a tensor."""
    return [_unwrapped(value) for value in values]


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return value.tolist() if isinstance(value, np.ndarray) else getattr(value, "data", value)


def nested(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of different lengths as verl stores them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
