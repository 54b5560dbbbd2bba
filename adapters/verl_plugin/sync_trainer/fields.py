"""The fields that composer_sync adds to a row in verl's TransferQueue, and to a call of a worker."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.options import NODE, SAMPLED
from composer_plugins.errors import ConfigError

# Per response token.
TEACHER = "composer_teacher_logprobs"  # of the sampled token, under the teacher's prompt
HINT_MASK = "composer_hint_mask"  # 1 where the hint's loss counts
REPLAY = "composer_replay_coefficients"  # d loss / d log pi of each token of a replayed completion
PER_TOKEN = (TEACHER, HINT_MASK, REPLAY)

# Per response token, and no tokens in a row that was not scored: the teacher's k largest log-probabilities
# and the log-probability of all other entries together, [tokens, k + 1], and the k ids, [tokens, k].
TOP_LOGPROBS = "composer_teacher_topk_logprobs"
TOP_IDS = "composer_teacher_topk_ids"
# 6 bytes per entry. Half precision changes a gradient by less than the model's own bfloat16 logits do.
TOP_DTYPES = {TOP_LOGPROBS: torch.float16, TOP_IDS: torch.int32}

# Other fields of a row that the teacher scores.
TEACHER_PROMPT = "composer_teacher_prompt"  # token ids
ROW = "composer_row"  # the row's number in a worker's part of the batch

# Per call.
TOP_K = "composer_top_k"  # the worker returns so many entries of each distribution
TAID_T = "composer_taid_t"


def rows_of(field: Any) -> list[Tensor]:
    """Return the rows of a per-token field, which TransferQueue nests unless all are equally long."""
    return list(field.unbind())


def response_positions(data: Any, logits: Tensor) -> list[Tensor]:
    """Return for each row the positions of the packed logits that predict its response's tokens.

    They go from the prompt's last token to the response's last but one. Raises ConfigError for logits
    that do not cover all tokens, as in an engine that cuts a sequence into parts for several ranks.
    """
    ends = torch.tensor([len(row) for row in rows_of(data["input_ids"])]).cumsum(0)
    if (shown := logits.shape[1]) != (tokens := int(ends[-1])):
        problem = f"it needs the logits of all {tokens} tokens of a micro-batch, and verl passed {shown}"
        remedy = "set ulysses_sequence_parallel_size and fsdp_config.ulysses_sequence_parallel_size to 1, "
        remedy += f"for the actor and the reference policy, {SAMPLED}"
        raise ConfigError(f"{NODE}.hint_divergence", problem, remedy)
    lengths = [len(row) for row in rows_of(data["responses"])]
    return [torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths, strict=True)]


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
