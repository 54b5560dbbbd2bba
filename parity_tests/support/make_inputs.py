"""Inputs for any catalogue row, by the names in its `needs` and `optional`, and the ways to call it.

A row that lands in the catalogue is covered by every suite that runs over `rows()`; one that needs an
input nobody can draw fails them (`draw` raises KeyError).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.catalogue import REQUIRED, Kind, Loss, Parameter, Value
from composer_plugins.inputs import INPUTS, TOKENS, TOP_K, VOCAB
from composer_plugins.plugins import losses

K = 3  # entries of a top-k input
VOCABULARY = 5  # no fewer tokens are drawn, but where a test says so
Batch = dict[str, Any]

# Where a gradient flows. Into every other input it must not.
TRAINED = {
    *("logprobs", "logits", "student_logits", "student_logprobs", "token_loss"),
    *("chosen", "rejected", "chosen_nll", "gold_nll", "scores"),
}
STOPPED = {"divergence-sdpo": {"student_logprobs"}}  # there the student's side of a detached ratio
FREE = {"entropies", "topk_logprobs"}  # a loss may decide: a bonus has a gradient, a gate has none
# Promises that the group ids are 0, 1, 2 ... which the laws about any ids break: only the compilers see it.
NUMBERED = "num_groups"
DICE = "uniform"  # what stands in for a generator


def rows(*kinds: Kind) -> list[Loss]:
    """The catalogue rows of these kinds, or all."""
    return [loss for loss in losses() if not kinds or loss.kind in kinds]


def row_id(row: Loss) -> str:
    """A test id."""
    return f"{row.kind}-{row.name}"


@dataclass(frozen=True)
class Setting:
    """One way to call a row: its parameters, and which of the optional inputs are given."""

    row: Loss
    label: str
    params: dict[str, Value]
    inputs: tuple[str, ...]

    def bound(self, rest: Batch) -> Callable[..., Any]:
        """The kernel with its parameters, and with what is no tensor: a generator, from its seed."""
        given = dict(rest)
        if "generator" in given:  # a new one, so that two calls draw the same numbers
            given["generator"] = torch.Generator().manual_seed(given["generator"])
        return partial(self.row.kernel(), **given, **self.params)

    def __call__(self, batch: Batch) -> Any:
        """What the kernel returns."""
        given = tensors(batch)
        needed = [given.pop(name) for name in self.row.needs if name in given]
        return self.bound({n: x for n, x in batch.items() if n not in tensors(batch)})(*needed, **given)

    def result(self, batch: Batch) -> Tensor:
        """The tensor a user works with: the loss, the advantages, the weight."""
        return value(self(batch))

    def within(self, vocab: int) -> "Setting":
        """This setting with a `top_k` that a vocabulary of that size has."""
        k = self.params.get("top_k", getattr(self.row.parameters.get("top_k"), "default", None))
        return self if k is None or k <= vocab else replace(self, params=self.params | {"top_k": vocab})

    @property
    def trained(self) -> tuple[str, ...]:
        """The inputs that get a gradient."""
        stopped = STOPPED.get(row_id(self.row), set())
        return tuple(name for name in self.inputs if name in TRAINED - stopped)


def value(result: Any) -> Tensor:
    """The loss of a TokenLoss or PairLoss, the first field of another tuple, a tensor as it is."""
    if isinstance(result, Tensor):
        return result
    return result.loss if hasattr(result, "loss") else result[0]


def settings(row: Loss, *, thorough: bool = True) -> Iterator[Setting]:
    """As the paper, with every optional input, as each upstream, and with each parameter turned on."""
    return (setting.within(VOCABULARY) for setting in _settings(row, thorough))


def _settings(row: Loss, thorough: bool) -> Iterator[Setting]:
    base = {n: sample(p) for n, p in row.parameters.items() if p.default is REQUIRED}
    for dialect in row.dialects:  # a REQUIRED number is best where somebody has published one
        base |= {n: v for n, v in dialect.params.items() if n in base}
    left_out = {"generator"} if DICE in row.optional else set()
    optional = tuple(name for name in row.optional if name not in {*left_out, NUMBERED})
    full = (*row.needs, *optional)
    least = (*row.needs, DICE) if DICE in optional else row.needs
    yield Setting(row, row.name, base, least)
    if full != least:
        yield Setting(row, f"{row.name}+{'+'.join(optional)}", base, full)
    if not thorough:
        if NUMBERED in row.optional:
            yield Setting(row, f"{row.name}+{NUMBERED}", base, (*full, NUMBERED))
        return
    if "generator" in row.optional:
        yield Setting(row, f"{row.name}+generator", base, (*row.needs, "generator"))
    for dialect in row.dialects:
        if dialect.params:
            yield Setting(row, f"{row.name}@{dialect.upstream}", base | dict(dialect.params), full)
    for name, parameter in row.parameters.items():
        if parameter.choices:
            others = [choice for choice in parameter.choices if choice != parameter.default]
        else:
            others = [sample(parameter)] if parameter.default is None else []
        for other in others:
            yield Setting(row, f"{row.name}({name}={other!r})", base | {name: other}, full)


def sample(parameter: Parameter) -> Value:
    """A value in the range of a parameter, off the ends."""
    if parameter.example is not None:
        return parameter.example
    if parameter.choices:
        return parameter.choices[0]
    low, high = max(parameter.low, -1e300), min(parameter.high, 1e300)
    if parameter.integer:
        return int(max(low, min(high, 2)))
    if math.isfinite(parameter.low) and math.isfinite(parameter.high):
        return (low + high) / 2
    if 0 < parameter.low < 1e-300:  # "above zero": most often a cap, of a ratio or a log ratio
        return min(1.5, high)
    return low + 0.5 if math.isfinite(parameter.low) else min(high - 0.5, 0.5)


def draw(
    setting: Setting,
    seed: int = 0,
    *,
    size: int = 4,
    tokens: int = 6,
    vocab: int = 7,
    spread: float = 0.3,
    live: float = 0.7,
    per_token: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """Every input of a setting, by name; with `live` below 1 the second row has no live token."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logprobs, scores = -0.05 - 4 * uniform(size, tokens), -20 * uniform(size) - 1
    logits, teacher = 2 * normal(size, tokens, vocab), 2 * normal(size, tokens, vocab)
    top = teacher.log_softmax(-1).topk(min(K, vocab), -1)

    def near(x: Tensor) -> Tensor:
        return (x + spread * normal(*x.shape)).clamp(max=-1e-3)

    def topk(x: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(-1, top.indices)

    token_mask = uniform(size, tokens) < live
    row_mask = uniform(size) < live
    if live < 1 and size > 1:
        token_mask[1], row_mask[1] = False, False
    over_tokens = any(INPUTS[n].shape in (TOKENS, VOCAB, TOP_K) for n in setting.inputs if n != "mask")
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
        "group_ids": ids if NUMBERED in setting.inputs else 7 * ids - 3,
        NUMBERED: max(size // 3, 1),
        "lengths": torch.randint(1, tokens + 1, (size,), generator=g),
        "baselines": uniform(size),
        "reward_components": normal(size, 3),
        "values": normal(size, tokens),
        "component_mask": uniform(size, 3) < live,
        "component_weights": uniform(3) + 0.1,
        "logits": logits,
        "token_rewards": last * normal(size, 1),
        "token_loss": normal(size, tokens),
    }
    batch = {name: drawn[name] for name in setting.inputs}
    return {
        n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in batch.items()
    }


def tensors(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch."""
    return {name: x for name, x in batch.items() if isinstance(x, Tensor)}


def floats(batch: Batch) -> dict[str, Tensor]:
    """The inputs that hold numbers, neither masks nor indices."""
    return {name: x for name, x in tensors(batch).items() if x.is_floating_point()}


def select(batch: Batch, index: Any) -> Batch:
    """The batch of some rows (or pairs)."""
    whole = {name for name in batch if INPUTS[name].shape in ("[]", "[components]")}
    return {n: x[index] if isinstance(x, Tensor) and n not in whole else x for n, x in batch.items()}


def pad(batch: Batch, columns: int) -> Batch:
    """The batch with masked columns of junk at its end."""
    padded = dict(batch)
    for name, x in tensors(batch).items():
        if INPUTS[name].shape in (TOKENS, VOCAB, TOP_K) and x.dim() > 1 and x.shape[1] > 1:
            end = x[:, :1].expand(-1, columns, *x.shape[2:])
            end = torch.full_like(end, torch.nan) if x.is_floating_point() else torch.zeros_like(end)
            padded[name] = torch.cat([x, end], 1)
    return padded


def over(mask: Tensor, x: Tensor) -> Tensor:
    """A mask [rows] or [rows, tokens] with as many axes as `x`."""
    return mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())).expand(x.shape)
