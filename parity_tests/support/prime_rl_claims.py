"""PRIME-RL's own losses beside ours with type "custom", as a checkout of it computes both."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.kernels.types import Metric, TokenLoss
from parity_tests.support.prime_rl_doubles import Pack, packed
from parity_tests.support.prime_rl_live import Upstream, drawn_inputs

OURS = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
USERS = {"policy": f"{__name__}:users_loss", "policy_params": {"cap": 1.5}}
Table = dict[str, Any]


class Claim(NamedTuple):
    """One of its losses with some options, and the kwargs with which ours is that loss."""

    name: str
    theirs: Table
    ours: Table


def claims(upstream: Upstream) -> Iterator[Claim]:
    """By version, because options were renamed and defaults moved."""
    if upstream.version == "v0.4.0":
        yield Claim("default", {}, {"policy": "masked_is@prime-rl<0.5"})
    if upstream.version == "v0.5.0":
        yield Claim("default (IPO)", {}, {"policy": "ipo@prime-rl<0.6"})
        theirs = {"ipo_mask_low": 0.05, "ipo_mask_high": 0.02, "kl_tau": 0.1}
        ours = {"tv_low": 0.05, "tv_high": 0.02, "kl_tau": 0.1}
        yield Claim("default, narrow", theirs, {"policy": "ipo@prime-rl<0.6", "policy_params": ours})
    if upstream.version in {"v0.6.0", "v0.8.0"} and upstream.has("default"):
        yield Claim("default (DPPO)", {}, {"policy": "dppo_tv@prime-rl"})
        theirs = {"dppo_mask_low": 0.05, "dppo_mask_high": 0.02, "kl_tau": 0.1, "adv_tau": 0.5}
        ours = {"tv_low": 0.05, "tv_high": 0.02, "kl_tau": 0.1, "adv_tau": 0.5}
        yield Claim("default, narrow", theirs, {"policy": "dppo_tv@prime-rl", "policy_params": ours})
    if upstream.version in {"v0.6.0", "v0.8.0"} and upstream.has("ipo"):
        yield Claim("ipo", {"type": "ipo"}, {"policy": "ipo@prime-rl"})


def without_a_mask(upstream: Upstream) -> Iterator[Claim]:
    """Bounds above 1, which a difference of probabilities never reaches: PRIME-RL's own tests set 10.0."""
    if upstream.version == "v0.5.0":
        theirs, policy = {"ipo_mask_low": 10.0, "ipo_mask_high": 10.0}, "ipo@prime-rl<0.6"
    elif upstream.version != "v0.4.0" and upstream.has("default"):
        theirs, policy = {"dppo_mask_low": 10.0, "dppo_mask_high": 10.0}, "dppo_tv@prime-rl"
    else:
        return
    ours = {"policy": policy, "policy_params": {"tv_low": 10.0, "tv_high": 10.0}}
    yield Claim("default, no mask", theirs, ours)


def users_loss(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, rollout_logprobs: Tensor | None = None, cap: float
) -> TokenLoss:
    """A loss of a user's own, named by import path: REINFORCE with a capped ratio."""
    assert rollout_logprobs is not None, "an optional input that PRIME-RL has is passed"
    ratio = torch.where(mask, logprobs.detach() - rollout_logprobs, 0.0).exp()
    loss = torch.where(mask, -ratio.clamp(max=cap) * advantages * logprobs, 0.0)
    return TokenLoss(loss, {"capped_frac": Metric(ratio > cap, mask)})


def compared(upstream: Upstream, claim: Claim, pack: Pack, scale: int) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients of one micro-batch through the checkout's compute_loss, with its loss and ours."""
    found = []
    theirs = {"type": "default"} | claim.theirs
    ours = {"type": "custom", "import_path": OURS, "kwargs": claim.ours}
    for table in (theirs, ours):
        leaves = [x.detach().requires_grad_() for x in pack.trainer_logprobs]
        cut = Pack(leaves, *(getattr(pack, name) for name in list(pack.__dataclass_fields__)[1:]))
        loss = upstream.compute_loss(cut, upstream.loss_fn(**table), scale)[0]
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)  # 0 where it was not called
        found.append([loss.detach(), *gradients])
    return found[0], found[1]


def drawn(upstream: Upstream, seed: int) -> Pack:
    """A micro-batch of four sequences, one of a single token, with padding and now and then with weights."""
    samples = [drawn_inputs(seed + i, n, spread=0.3) for i, n in enumerate((9, 1, 33, 5))]
    if upstream.version == "v0.8.0" and seed % 2:
        for i, sample in enumerate(samples):
            sample["weights"] = 0.5 + 0.25 * torch.full_like(sample["advantages"], i)
    if seed % 3 == 0:
        samples[0]["reference"] = samples[0]["trainer_logprobs"] - 0.1
    return packed(samples, padding=seed % 5)
