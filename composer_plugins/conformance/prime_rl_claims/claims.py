"""PRIME-RL's own losses beside ours with type "custom", as a checkout of it computes both."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import own_losses
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.prime_rl_claims.packs import Pack, drawn_inputs, packed
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.frameworks.contract import NamedLoss, Option
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.testing.draws import Draw, flag

OURS = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
Table = dict[str, Any]


class Configured(NamedTuple):
    """One of its losses with some options, and the kwargs with which ours is that loss."""

    name: str
    theirs: Table
    ours: Table


def given(own: NamedLoss, value_of: Callable[[Option, list[float]], float]) -> Table:
    """A table of this loss, `value_of(option, values)` for each option that is a number.

    The values are PRIME-RL's default and others that our loss can have: below and above it, and near 1.
    """
    table: Table = {}
    for option in own.own:
        if isinstance(default := option.default, float):
            values = [default / 4, default**0.1, 50 * default] if default else [0.1, 0.5]
            values = [x for x in values if not own_losses.refusal(own, option, x)]
            table[option.key] = value_of(option, [default, *values])
    return table


def configured(upstream: Upstream) -> Iterator[Configured]:
    """Each loss of this version with its defaults and with other values, and the kwargs for each."""
    for own in PRIME_RL.losses:
        if own_losses.is_in(own, upstream.generation):
            others = given(own, lambda _, values: values[1 % len(values)])
            for name, table in ((own.options["type"], {}), (f"{own.options['type']}, other values", others)):
                yield named(own, name, table)


def named(own: NamedLoss, name: str, table: Table) -> Configured:
    """A loss of PRIME-RL's with these options, and the kwargs of ours that the framework's table gives."""
    kwargs, differences = own_losses.kwargs_of(own, table)
    assert not differences
    return Configured(name, {**own.options, **table}, {"policy": own.row} | kwargs)


def compared(
    upstream: Upstream, claim: Configured, pack: Pack, scale: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradients of one micro-batch through the checkout's compute_loss, with its loss and ours."""
    found = []
    ours = {"type": "custom", "import_path": OURS, "kwargs": claim.ours}
    for table in (claim.theirs, ours):
        leaves = [x.detach().requires_grad_() for x in pack.trainer_logprobs]
        cut = Pack(leaves, *(getattr(pack, name) for name in list(pack.__dataclass_fields__)[1:]))
        loss = upstream.compute_loss(cut, upstream.loss_fn(**table), scale)[0]
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)  # 0 where it was not called
        found.append([loss.detach(), *gradients])
    return found[0], found[1]


def drawn(upstream: Upstream, seed: int) -> Pack:
    """A micro-batch of four sequences, one of a single token, with padding and now and then with weights."""
    spread = 1.0 if seed % 4 == 0 else 0.3
    samples = [drawn_inputs(seed + i, n, spread=spread) for i, n in enumerate((9, 1, 33, 5))]
    if upstream.version == "v0.8.0" and seed % 2:
        for i, sample in enumerate(samples):
            sample["weights"] = 0.5 + 0.25 * torch.full_like(sample["advantages"], i)
    if seed % 3 == 0:
        # Up to v0.5 a teacher scores every sample. Later a sample may have no reference, which packing fills.
        for sample in samples if upstream.version in {"v0.4.0", "v0.5.0"} else samples[:1]:
            sample["reference"] = sample["trainer_logprobs"] - 0.1
    return packed(samples, padding=seed % 5)


LOSSES = "the loss module"
# Losses of which ours has the gradient alone: their value is -A r, and that of ours -sg(A r) log pi.
BY_GRADIENT = {"icepop": "the gradient alone: the value is another number"}


def compare(upstream: Upstream, own: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """One micro-batch, divided by some number of tokens, with the defaults or with other values."""
    table: Table = {}
    if flag(draw, "other values"):
        table = given(own, lambda option, values: draw.choose(values, option.key))
    pack = drawn(upstream, draw.integer(0, 2**20, "seed"))
    claim = named(own, own.options["type"], table)
    theirs, ours = compared(upstream, claim, pack, draw.integer(1, 500, "scale"))
    largest = max(float(gradient.abs().max()) for gradient in theirs[1:])
    scale = max(float(theirs[0].abs()), 1e-3)
    if own.options["type"] not in BY_GRADIENT:
        yield Compared(ours[0], theirs[0], 60, max(60 * largest, 1e-3), scale=scale)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        yield Compared(a, b, 60, max(float(b.abs().max()), 0.0), what=GRADIENT, scale=largest)


def claims(upstream: Upstream) -> list[Claim]:
    """The claims about this checkout: one for each loss that it has."""
    here = [own for own in PRIME_RL.losses if own_losses.is_in(own, upstream.generation)]
    return [
        Claim(
            "policy",
            own.row,
            kind := own.options["type"],
            Place(LOSSES),
            partial(compare, upstream, own),
            BY_GRADIENT.get(kind, ""),
        )
        for own in here
    ]
