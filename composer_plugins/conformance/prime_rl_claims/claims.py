"""PRIME-RL's own losses beside ours with type "custom", as a checkout of it computes both."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import native
from composer_plugins.adapters.prime_rl_plugin.upstream import generation_of
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.prime_rl_claims.packs import Pack, drawn_inputs, packed
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.testing.draws import Draw

OURS = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
Table = dict[str, Any]


class Configured(NamedTuple):
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


def configured(upstream: Upstream) -> Iterator[Configured]:
    """Each loss of this version and its options, with the kwargs that the table of `native` gives."""
    generation = generation_of(upstream.version)
    for own in native.NATIVE:
        if generation in own.generations and upstream.has(own.kind):
            options = {option.name for option in own.options}
            for name, table in {own.kind: {}, **TABLES[upstream.version, own.kind]}.items():
                assert table.keys() <= options
                kwargs, differences = native.kwargs_of(own, table)
                assert not differences
                yield Configured(name, {"type": own.kind, **table}, kwargs)


def compared(
    upstream: Upstream, claim: Configured, pack: Pack, scale: int
) -> tuple[list[Tensor], list[Tensor]]:
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


LOSSES = "the loss module"


def compare(upstream: Upstream, claim: Configured, draw: Draw) -> Iterator[Compared]:
    """One micro-batch, divided by some number of tokens."""
    pack = drawn(upstream, draw.integer(0, 2**20, "seed"))
    theirs, ours = compared(upstream, claim, pack, draw.integer(1, 500, "scale"))
    largest = max(float(gradient.abs().max()) for gradient in theirs[1:])
    scale = max(float(theirs[0].abs()), 1e-3)
    yield Compared(ours[0], theirs[0], 60, max(60 * largest, 1e-3), scale=scale)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        yield Compared(a, b, 60, max(float(b.abs().max()), 0.0), what=GRADIENT, scale=largest)


def claims(upstream: Upstream) -> list[Claim]:
    """The claims about this checkout."""
    made: Callable[..., Any] = partial(partial, compare, upstream)
    return [
        Claim("policy", one.ours.get("policy", "dppo_tv@prime-rl"), one.name, Place(LOSSES), made(one))
        for one in configured(upstream)
    ]
