"""Fill `loss_fn_inputs` from rollouts: advantages by group, a teacher's log-probabilities, pairs.

Every function returns new data. A completion is the targets at which the entry `mask` is 1: `mask="weights"`
names another entry.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from composer_plugins.adapters.tinker_loss.upstream import pair_weight, read_mask, targets_of, with_entries
from composer_plugins.errors import DataError
from composer_plugins.frameworks.tinker import ENTRIES, TINKER
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import choose

MASK = ENTRIES["mask"]


def add_advantages(
    data: Sequence[Any],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    advantage: str = "grpo",
    mask: str = MASK,
    **params: Any,
) -> list[Any]:
    """Add `advantages`: for each datum one number at every token of its completion, and 0 elsewhere.

    `rewards` and `groups` have one entry for each datum, and may be tensors; data of the same prompt share a
    group. `advantage` is an estimator of the catalogue that needs no more than rewards, groups and lengths,
    with `params`.
    Pass all data of a step at once: an estimator may look at all groups.
    Raises ConfigError for another estimator, and DataError for a reward that is not finite.
    """
    choice = choose("advantage", advantage, params, option="advantage")
    TINKER.require(choice)
    masks = [read_mask(data, row, mask) for row in range(len(data))]
    if not len(data) == len(rewards) == len(groups):
        problem = f"there are {len(data)} data, {len(rewards)} rewards and {len(groups)} groups"
        raise DataError("rewards", problem, "pass one reward and one group for each datum")
    numbers = torch.tensor([float(one) for one in rewards], dtype=torch.float64)
    if wrong := (~numbers.isfinite()).nonzero().flatten().tolist():
        problem, remedy = f"it is {numbers[wrong[0]]:g}", "leave that completion out, or give it a number"
        raise DataError(f"rewards[{wrong[0]}]", problem, remedy)
    names = [one.tolist() if isinstance(one, torch.Tensor) else one for one in groups]
    ids = {group: i for i, group in enumerate(dict.fromkeys(names))}
    given = {
        "rewards": numbers,
        "group_ids": torch.tensor([ids[group] for group in names]),
        "lengths": torch.tensor([int(one.sum()) for one in masks]),
    }
    computed = call(choice, given, check=True).float()
    return [
        with_entries(one, {ENTRIES["advantages"]: torch.where(where, value, 0.0)})
        for one, where, value in zip(data, masks, computed, strict=True)
    ]


def add_teacher_logprobs(
    data: Sequence[Any], teacher: Any, prompts: Sequence[Any], *, mask: str = MASK
) -> list[Any]:
    """Add `teacher_logprobs`, log T(y_t | the teacher's prompt, y_<t), and `hint_mask`.

    `teacher` is a SamplingClient: of the base model, of an earlier checkpoint, or of a stronger model with
    the same tokens. `prompts` has for each datum the prompt with the hint, a ModelInput or a list of tokens;
    None is a datum without a hint, which the hint then does not train. The completion is everything from the
    first target in the mask on.
    """
    tokens = [None if one is None else _tokens(f"prompts[{row}]", one) for row, one in enumerate(prompts)]
    key, added = ENTRIES["teacher_logprobs"], []
    for row, found in enumerate(_scored(data, teacher, tokens, mask)):
        where = read_mask(data, row, mask)
        hinted = where if prompts[row] is not None else torch.zeros_like(where)
        added.append(with_entries(data[row], {key: found, ENTRIES["hint_mask"]: hinted.float()}))
    return added


def add_ref_logprobs(data: Sequence[Any], reference: Any, *, mask: str = MASK) -> list[Any]:
    """Add `ref_logprobs`, the log-probabilities of the completions under a SamplingClient, as DPO needs."""
    # The input that predicts target t is token t, so the prompt is one token longer than `_start`.
    starts = [_start(data, row, mask) for row in range(len(data))]
    seen = [_tokens(f"data[{row}].model_input", one.model_input) for row, one in enumerate(data)]
    prompts = [one[: start + 1] for one, start in zip(seen, starts, strict=True)]
    scored = _scored(data, reference, prompts, mask)
    return [
        with_entries(one, {ENTRIES["ref_logprobs"]: found}) for one, found in zip(data, scored, strict=True)
    ]


def mark_pairs(
    chosen: Sequence[Any], rejected: Sequence[Any], weights: Sequence[float] | None = None
) -> list[Any]:
    """The data of preference pairs, chosen[i] better than rejected[i], for the replay channel.

    `weights` has a factor of at least 0 for each pair. Pass all pairs of a call to one `mark_pairs`: it
    numbers them.
    """
    weights = [1.0] * len(chosen) if weights is None else weights
    marked = []
    for number, (better, worse, given) in enumerate(zip(chosen, rejected, weights, strict=True), start=1):
        weight = torch.tensor([pair_weight(f"weights[{number - 1}]", given)])
        for sign, one in ((number, better), (-number, worse)):
            entries = {ENTRIES["pair"]: torch.tensor([sign]), ENTRIES["pair_weight"]: weight}
            marked.append(with_entries(one, entries))
    return marked


def _tokens(where: str, prompt: Any) -> list[int]:
    """The tokens of a prompt, which is a ModelInput, a list, an array or a tensor of them."""
    found = prompt.to_ints() if hasattr(prompt, "to_ints") else prompt
    found = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(found, Sequence) or not found or any(type(one) is not int for one in found):
        problem = f"it is of type {type(prompt).__name__} and has no tokens"
        raise DataError(where, problem, "pass a ModelInput or a list of tokens: tokenizer.encode(text)")
    return list(found)


def _start(data: Sequence[Any], row: int, key: str) -> int:
    """The position of the first target of the completion."""
    where = read_mask(data, row, key).nonzero()
    if not len(where):
        raise DataError(f"data[{row}]", f"{key!r} is 0 everywhere", "leave the datum out")
    return int(where[0])


def _scored(
    data: Sequence[Any], client: Any, prompts: Sequence[Sequence[int] | None], key: str
) -> list[torch.Tensor]:
    """log p(y_t | prompt, y_<t) at targets of the completion, 0 at targets of the prompt; [tokens] each."""
    targets = [targets_of(data, row).tolist() for row in range(len(data))]
    starts = [_start(data, row, key) for row in range(len(data))]
    futures: dict[tuple[int, ...], Any] = {}  # a group often has the same completion several times
    asked: list[tuple[int, ...]] = []
    for one, prompt, own, start in zip(data, prompts, targets, starts, strict=True):
        whole = () if prompt is None else (*prompt, *own[start:])
        if whole and whole not in futures:
            futures[whole] = client.compute_logprobs(type(one.model_input).from_ints(list(whole)))
        asked.append(whole)
    scored = []
    for row, (whole, own, start) in enumerate(zip(asked, targets, starts, strict=True)):
        length = len(own) - start
        answer = futures[whole].result() if whole else [0.0] * length
        # The first token has no log-probability: Tinker returns None for it, SkyRL's server leaves it out.
        if whole and len(answer) not in (len(whole), len(whole) - 1):
            problem = f"the SamplingClient returned {len(answer)} numbers for {len(whole)} tokens"
            raise DataError(f"data[{row}]", problem, "pass a client that returns one for each token")
        scored.append(torch.tensor([0.0] * start + answer[-length:]))
    return scored
