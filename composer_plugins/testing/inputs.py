"""Random inputs for a loss, by the names in its row (`composer_plugins.losses.inputs.INPUTS`)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from composer_plugins.losses.inputs import INPUTS, TOKENS, TOP_K, VOCAB

Batch = dict[str, Any]

# Optional inputs that replace another input, or that need group ids of a certain form.
GENERATOR, UNIFORM, NUM_GROUPS = "generator", "uniform", "num_groups"
TOP_K_SIZE = 3
JUNK = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4], dtype=torch.float64)
FINITE = torch.tensor(
    [-40.0, -0.5, 0.0, 7.0], dtype=torch.float64
)  # as at a prompt, a tool's answer, padding


# What the batches of a subject are drawn with; the last one has responses of up to 11 tokens.
DRAWS: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": 1, "spread": 1.5, "unmasked": 0.5},
    {"seed": 2, "spread": 0.01, "per_token": False, "tokens": 3, "size": 5},
    {"seed": 3, "size": 1, "tokens": 1, "unmasked": 1.0},
    {"seed": 4, "size": 9, "tokens": 11, "unmasked": 0.95},
]


def draw(
    names: Sequence[str],
    seed: int = 0,
    *,
    size: int = 4,
    tokens: int = 6,
    vocab: int = 7,
    spread: float = 0.3,
    unmasked: float = 0.7,
    per_token: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Draw the inputs of these names; KeyError where nothing here can draw one.

    `unmasked` is the share of unmasked tokens or rows; below 1 the second row is masked out. `spread` is how
    far the log-probabilities of other policies lie from the policy's.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logprobs, scores = -0.05 - 4 * uniform(size, tokens), -20 * uniform(size) - 1
    logits, teacher = 2 * normal(size, tokens, vocab), 2 * normal(size, tokens, vocab)
    top = teacher.log_softmax(-1).topk(min(TOP_K_SIZE, vocab), -1)

    def near(x: Tensor) -> Tensor:
        return (x + spread * normal(*x.shape)).clamp(max=-1e-3)

    def topk(x: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(-1, top.indices)

    token_mask = uniform(size, tokens) < unmasked
    row_mask = uniform(size) < unmasked
    if unmasked < 1 and size > 1:
        token_mask[1], row_mask[1] = False, False
    over_tokens = any(INPUTS[n].shape in (TOKENS, VOCAB, TOP_K) for n in names if n != "mask")
    last = torch.nn.functional.one_hot(torch.full((size,), tokens - 1), tokens)
    advantages = normal(size, tokens) if per_token else normal(size, 1)
    ids = torch.randint(0, max(size // 3, 1), (size,), generator=g)
    drawn: Batch = {
        "logprobs": logprobs,
        "old_logprobs": near(logprobs),
        "rollout_logprobs": near(logprobs),
        "ref_logprobs": near(logprobs),
        "region_logprobs": near(logprobs),
        "advantages": advantages,
        "mask": token_mask if over_tokens else row_mask,
        "log_weights": (spread * normal(size, tokens)).clamp(max=2),
        "uniform": uniform(size, tokens),
        "entropies": 2 * uniform(size, tokens),
        "generator": seed,
        "topk_logprobs": topk(logits),
        "rollout_topk_logprobs": topk(logits + spread * normal(size, tokens, vocab)),
        "student_logits": logits,
        "teacher_logits": teacher,
        "student_logprobs": logprobs,
        "teacher_logprobs": near(logprobs),
        "teacher_topk_logprobs": top.values,
        "teacher_topk_ids": top.indices,
        "chosen": scores,
        "rejected": near(scores),
        "ref_chosen": near(scores),
        "ref_rejected": near(scores),
        "chosen_nll": 3 * uniform(size) + 0.1,
        "gold_nll": 3 * uniform(size) + 0.1,
        "scores": scores,
        "ref_scores": near(scores),
        "desirable": uniform(size) < 0.5,
        "reference_kl": uniform(1)[0],
        "reward_shift": normal(1)[0],
        "rewards": torch.randint(0, 5, (size,), generator=g) / 10 + 0.1 * normal(size).round(),
        "group_ids": ids if NUM_GROUPS in names else 7 * ids - 3,
        NUM_GROUPS: max(size // 3, 1),
        "lengths": torch.randint(1, tokens + 1, (size,), generator=g),
        "baselines": uniform(size),
        "reward_components": normal(size, 3),
        "values": normal(size, tokens),
        "component_mask": uniform(size, 3) < unmasked,
        "component_weights": uniform(3) + 0.1,
        "logits": logits,
        "token_rewards": last * normal(size, 1),
        "token_loss": normal(size, tokens),
        "prompt_tokens": token_mask.sum(-1) + 3,
        "support_logprobs": topk(logits),
        "rollout_support_logprobs": topk(logits + spread * normal(size, tokens, vocab)),
        "reference_rewards": torch.randint(0, 5, (size, 4), generator=g).to(torch.float64) / 10,
        "correction_weights": uniform(size, tokens) + 0.5,
    }
    pi = drawn["old_logprobs"].exp()  # one entry of a vocabulary, whose others share the rest
    drawn["sum_pi_squared"] = pi.square() + uniform(size, tokens) * (1 - pi).square()
    batch = {name: drawn[name] for name in names}
    return {
        n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in batch.items()
    }


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch."""
    return {name: x for name, x in batch.items() if isinstance(x, Tensor)}


def float_tensors(batch: Batch) -> dict[str, Tensor]:
    """The floating-point tensors of a batch: neither masks nor indices."""
    return {name: x for name, x in tensors(batch).items() if x.is_floating_point()}


def select_rows(batch: Batch, index: Any) -> Batch:
    """The batch with only the rows (or pairs) of an index."""
    whole = {name for name in batch if INPUTS[name].shape in ("[]", "[components]")}
    return {n: x[index] if isinstance(x, Tensor) and n not in whole else x for n, x in batch.items()}


def pad_tokens(batch: Batch, columns: int, value: float = torch.nan) -> Batch:
    """The batch with masked columns of this value at its end."""
    padded = dict(batch)
    for name, x in tensors(batch).items():
        if INPUTS[name].shape in (TOKENS, VOCAB, TOP_K) and x.dim() > 1 and x.shape[1] > 1:
            end = x[:, :1].expand(-1, columns, *x.shape[2:])
            end = torch.full_like(end, value) if x.is_floating_point() else torch.zeros_like(end)
            padded[name] = torch.cat([x, end], 1)
    return padded


def expand_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Expand a mask [rows] or [rows, tokens] to the shape of `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())).expand(x.shape)


def with_junk(x: Tensor, mask: Tensor, junk: Tensor = JUNK) -> Tensor:
    """`x` with these numbers in turn wherever the mask [rows] or [rows, tokens] is False."""
    numbers = junk.to(x.dtype).repeat(x.numel())[: x.numel()].view(x.shape)
    return torch.where(expand_mask(mask, x), x, numbers)


def one_of_each_row(mask: Tensor) -> list[tuple[int, int]]:
    """An unmasked token of each row that has one: in turn the last, the first, and one in the middle."""
    found = []
    for row, unmasked in enumerate(mask):
        columns = unmasked.nonzero().flatten().tolist()
        if columns:
            found.append((row, columns[(-1, 0, len(columns) // 2)[row % 3]]))
    return found


def poisoned_at(x: Tensor, where: Iterable[Sequence[int]]) -> Tensor:
    """`x` with NaN at these tokens, or rows; of a vocabulary, at one entry."""
    x = x.clone()
    for row, *token in where:
        places = [min(one, x.shape[1] - 1) for one in token]  # there may be one number per row
        x[(row, *places, *[0] * (x.dim() - 1 - len(places)))] = torch.nan
    return x
