"""The installed verl, called on drawn tensors: its configs, its losses, and what it reduces them with.

The masks given to verl are 0 and 1 in int64, as its trainer's are: a length plus 1e-8 is then taken in
float32, where it is the length, and everything else stays in float64. Where a test gives a float64
mask instead it says why.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

from composer_plugins.catalogue import Kind, Loss, choose, of_kind
from composer_plugins.plugins import losses
from composer_plugins.testing.assertions import assert_loss_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import seeds

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
FLOAT64 = torch.float64

# In nats: on-policy, one step away, stale, and beyond every clamp that verl has.
SPREADS = (0.0, 0.01, 0.3, 3.0, 30.0)


class Batch(NamedTuple):
    """What a policy loss is called with; what is masked is an ordinary number, verl multiplies by 0."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None  # of a rollout correction


def generator(draw: st.DrawFn) -> torch.Generator:
    """Numbers are torch's: Hypothesis draws the shape of a case and one seed."""
    return torch.Generator().manual_seed(draw(seeds, label="seed"))


def rows_and_tokens(draw: st.DrawFn, max_rows: int = 5, max_tokens: int = 7) -> tuple[int, int]:
    """The size of a batch, one row and one token included."""
    return draw(st.integers(1, max_rows), label="rows"), draw(st.integers(1, max_tokens), label="tokens")


def draw_mask(draw: st.DrawFn, g: torch.Generator, rows: int, tokens: int) -> Tensor:
    """Live tokens with holes and empty rows, or every row a prefix; at least one token is live."""
    kind = draw(st.sampled_from(["all", "holes", "sparse", "prefixes"]), label="mask")
    if kind == "prefixes":
        lengths = torch.randint(0, tokens + 1, (rows, 1), generator=g)
        mask = torch.arange(tokens) < lengths
    else:
        live = {"all": 1.0, "holes": 0.7, "sparse": 0.2}[kind]
        mask = torch.rand(rows, tokens, generator=g) < live
    if not mask.any():
        mask[-1, 0] = True  # of a batch without an unmasked token verl has no loss: a test of its own
    return mask


@st.composite
def policy_batches(draw: st.DrawFn) -> Batch:
    """Log-probabilities at any distance, advantages per token or per row, ties and zeros among them."""
    g = generator(draw)
    rows, tokens = rows_and_tokens(draw)
    spread = draw(st.sampled_from(SPREADS), label="log-ratio spread")
    shape = (rows, tokens)
    noise = spread * torch.randn(shape, generator=g, dtype=FLOAT64)
    logprobs = -4 * torch.rand(shape, generator=g, dtype=FLOAT64) - noise.clamp(min=0)
    advantages = torch.randint(-3, 4, shape, generator=g).to(FLOAT64) / 10
    if draw(st.booleans(), label="advantages without ties"):
        advantages += torch.randn(shape, generator=g, dtype=FLOAT64)
    if draw(st.booleans(), label="one advantage per row"):
        advantages = advantages[:, :1].expand(shape).clone()
    weights = None
    if draw(st.booleans(), label="rollout correction"):
        weights = 2 * torch.rand(shape, generator=g, dtype=FLOAT64)
    return Batch(logprobs, logprobs + noise, advantages, draw_mask(draw, g, rows, tokens), weights)


@st.composite
def global_batches(draw: st.DrawFn, mask: Tensor) -> dict[str, Any]:
    """The mode and what verl passes beside it: nothing, or the counts of the whole batch over ranks."""
    info: dict[str, Any] = {}
    if draw(st.booleans(), label="a part of a larger batch"):
        info["dp_size"] = draw(st.sampled_from([1, 2, 8]), label="ranks")
        info["batch_num_tokens"] = int(mask.sum()) + draw(st.integers(0, 50), label="tokens elsewhere")
        info["global_batch_size"] = len(mask) + draw(st.integers(0, 9), label="rows elsewhere")
    if draw(st.booleans(), label="a constant length"):
        info["loss_scale_factor"] = draw(st.sampled_from([1, 10, 4096]), label="length")
    return info


def actor(info: dict[str, Any] | None = None, **options: Any) -> ActorConfig:
    """An actor's configuration: verl's defaults, and `options` over them, those of policy_loss among them."""
    own = {name: options.pop(name) for name in list(options) if name in PolicyLossConfig.__dataclass_fields__}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(**own),
        global_batch_info=dict(info or {}),
        **options,
    )


def row_kernel(kind: Kind, name: str, **params: Any) -> Callable[..., Any]:
    """The kernel of a catalogue row with its dialect's parameters and `params`, each in its range."""
    choice = choose(losses(), kind, name, params)
    return partial(choice.loss.kernel(), **choice.params)


def with_dialect(kind: Kind) -> list[Loss]:
    """The rows of one kind that say what they are in verl (in this version: not those of "verl<0.7.1")."""
    return [
        loss for loss in losses() if loss.kind == kind and any(d.upstream == "verl" for d in loss.dialects)
    ]


def verl_policy_loss(
    name: str, batch: Batch, config: ActorConfig, mode: str
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """verl's loss, its gradient in the log-probabilities, and what it logs."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=batch.old_logprobs,
        log_prob=logprobs,
        advantages=batch.advantages.clone(),
        response_mask=batch.mask.long(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=batch.weights,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss, gradient, metrics


def reduced(token_loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """Our row of an aggregation mode with the numbers that verl's agg_loss is given."""
    loss = of_kind(losses(), "aggregation")[mode]
    given = {
        "num_tokens": info.get("batch_num_tokens"),
        "num_sequences": info.get("global_batch_size"),
        "max_length": info.get("loss_scale_factor"),
    }
    params = {name: given[name] for name in loss.parameters if given[name] is not None}
    sizes = {"rows": mask.shape[0], "width": mask.shape[1]}
    defaults = {name: sizes[size] for name, size in loss.dialect("verl").denominators.items()}
    return info.get("dp_size", 1) * row_kernel("aggregation", f"{mode}@verl", **(defaults | params))(
        token_loss, mask
    )


def assert_policy_parity(
    kernel: Callable[..., Any], batch: Batch, theirs: tuple[Tensor, Tensor], mode: str, info: dict[str, Any]
) -> Any:
    """Our kernel, reduced, equals verl's loss and gradient; ours gets junk wherever the mask is False."""
    __tracebackhide__ = True
    mask = batch.mask
    logprobs = with_junk(batch.logprobs, mask).requires_grad_()
    ours = kernel(logprobs, with_junk(batch.old_logprobs, mask), with_junk(batch.advantages, mask), mask)
    token_loss = ours.loss if batch.weights is None else ours.loss * batch.weights
    loss = reduced(token_loss, mask, mode, info)
    assert_loss_parity(loss, token_loss, logprobs, theirs=theirs[0], their_gradient=theirs[1])
    return ours


def names(ids: Iterable[int]) -> np.ndarray:
    """Group ids as verl has them: strings in an array of objects."""
    return np.array([f"prompt {i}" for i in ids], dtype=object)


class Rollouts(NamedTuple):
    """What an advantage estimator is called with: one reward per row, at some token of it."""

    rewards: Tensor
    token_rewards: Tensor
    ids: Tensor
    mask: Tensor


@st.composite
def rollouts(draw: st.DrawFn, min_group: int = 1) -> Rollouts:
    """Groups of any size in any order; rewards non-dyadic and often tied, small beside their offset too."""
    g = generator(draw)
    sizes = draw(st.lists(st.integers(min_group, 5), min_size=1, max_size=4), label="group sizes")
    ids = torch.repeat_interleave(torch.arange(len(sizes)) * 7 - 3, torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=g)]
    rows, tokens = len(ids), draw(st.integers(1, 6), label="tokens")
    rewards = torch.randint(0, draw(st.sampled_from([1, 2, 5])), (rows,), generator=g).to(FLOAT64) / 10
    rewards += draw(st.sampled_from([0.0, 0.1, -3.3, 1e4]), label="offset")
    if draw(st.booleans(), label="rewards without ties"):
        rewards += torch.randn(rows, generator=g, dtype=FLOAT64)
    mask = draw_mask(draw, g, rows, tokens)
    # At the last attended token, where verl puts it: masked if a tool wrote it or a correction rejected it.
    last = (mask * torch.arange(1, tokens + 1)).argmax(1, keepdim=True)
    last = last + (torch.rand(rows, 1, generator=g) * (tokens - last)).long()
    token_rewards = torch.zeros(rows, tokens, dtype=FLOAT64).scatter(1, last, rewards.unsqueeze(1))
    return Rollouts(rewards, token_rewards, ids, mask)


def verl_advantages(estimator: str, batch: Rollouts, **more: Any) -> Tensor:
    """verl's advantages per token."""
    options = {
        "token_level_rewards": batch.token_rewards.clone(),
        "response_mask": batch.mask.long(),
        "index": names(batch.ids.tolist()),
    }
    advantages, _ = get_adv_estimator_fn(estimator)(**(options | more))
    return advantages


def of_verl(registry: Mapping[str, Callable[..., Any]]) -> set[str]:
    """The names that verl itself registered: a plugin's, our own adapter's too, are left out."""
    return {name for name, function in registry.items() if function.__module__.startswith("verl.")}


def assert_complete(
    registry: Mapping[str, Callable[..., Any]], compared: Iterable[str], reasons: Mapping[str, str]
) -> None:
    """Every name of a registry is compared or has a reason not to be, and none is listed that is gone."""
    __tracebackhide__ = True
    compared = set(compared)
    assert not compared & set(reasons), "compared, and yet with a reason not to be"
    assert not of_verl(registry) - compared - set(reasons), "verl has more: compare them, or say why not"
    assert not (compared | set(reasons)) - of_verl(registry), "verl has no longer what is listed"
