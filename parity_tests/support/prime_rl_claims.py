"""PRIME-RL's own losses beside ours with type "custom", as a checkout of it computes both."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import native
from composer_plugins.adapters.prime_rl_plugin.upstream import generation_of
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


# By version and type: options with which PRIME-RL's loss is compared, beside its defaults.
TABLES: dict[tuple[str, str], dict[str, Table]] = {
    ("v0.4.0", "default"): {
        "default, narrow": {"token_mask_low": 0.8, "token_mask_high": 1.2, "geo_mask_low": 0.9}
        | {"geo_mask_high": 1.1, "kl_tau": 0.1, "adv_tau": 0.5},
        "default, with a teacher": {"adv_tau": 0.5, "teacher_tau": 0.2},
    },
    ("v0.5.0", "default"): {
        "default, narrow": {"ipo_mask_low": 0.05, "ipo_mask_high": 0.02, "kl_tau": 0.1},
        "default, no mask": {"ipo_mask_low": 10.0, "ipo_mask_high": 10.0},  # PRIME-RL's own tests set 10.0
        "default, with a teacher": {"adv_tau": 0.5, "teacher_tau": 0.2},
    },
    ("v0.6.0", "default"): (
        dppo := {
            "default, narrow": {"dppo_mask_low": 0.05, "dppo_mask_high": 0.02, "kl_tau": 0.1, "adv_tau": 0.5},
            "default, no mask": {"dppo_mask_low": 10.0, "dppo_mask_high": 10.0},
        }
    ),
    ("v0.6.0", "ipo"): (ipo := {"ipo, narrow": {"ipo_threshold": 0.03, "kl_tau": 0.1, "adv_tau": 0.5}}),
    ("v0.8.0", "default"): dppo,
    ("v0.8.0", "ipo"): ipo,
}


def claims(upstream: Upstream) -> Iterator[Claim]:
    """Each loss of this version and its options, with the kwargs that the table of `native` gives."""
    generation = generation_of(upstream.version)
    for own in native.NATIVE:
        if generation in own.generations and upstream.has(own.kind):
            options = {option.name for option in own.options}
            for name, table in {own.kind: {}, **TABLES[upstream.version, own.kind]}.items():
                assert table.keys() <= options
                kwargs, differences = native.kwargs_of(own, table)
                assert not differences
                yield Claim(name, {"type": own.kind, **table}, kwargs)


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
        # Up to v0.5 a teacher scores every sample. Later a sample may have no reference, which packing fills.
        for sample in samples if upstream.version in {"v0.4.0", "v0.5.0"} else samples[:1]:
            sample["reference"] = sample["trainer_logprobs"] - 0.1
    return packed(samples, padding=seed % 5)
