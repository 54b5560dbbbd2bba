"""PRIME-RL's own losses compared with ours with type "custom", as a checkout of it computes both."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin.migration import params_of
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.prime_rl_claims.packs import Pack, drawn_inputs, packed
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import NamedLoss, Option
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.testing.draws import Draw, flag

OURS = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
Table = dict[str, Any]


def given(own: NamedLoss, value_of: Callable[[Option, list[float]], float]) -> Table:
    """A table of this loss, `value_of(option, values)` for each option that is a number.

    The values are PRIME-RL's default and others that our loss can have: below and above it, and near 1.
    """
    table: Table = {}
    for option in own.own:
        if isinstance(default := option.default, float):
            values = [default / 4, default**0.1, 50 * default] if default else [0.1, 0.5]
            table[option.key] = value_of(option, [default, *(x for x in values if has(own, {option.key: x}))])
    return table


def has(own: NamedLoss, options: Table) -> bool:
    """Whether our loss can have these values."""
    with suppress(ConfigError):
        params_of(own, options)
        return True
    return False


def tables(own: NamedLoss, options: Table) -> tuple[Table, Table]:
    """`[trainer.loss]` of a loss with these options, and with ours by the kwargs of the framework's table."""
    kwargs = {"policy": own.row, "policy_params": params_of(own, options)}
    ours = {"type": "custom", "import_path": OURS, "kwargs": kwargs}
    return {**own.options, **options}, ours


def compared(upstream: Upstream, table: Table, pack: Pack, scale: int) -> list[Tensor]:
    """Value and gradients of one micro-batch through the checkout's compute_loss."""
    leaves = [x.detach().requires_grad_() for x in pack.trainer_logprobs]
    cut = replace(pack, trainer_logprobs=leaves)
    loss = upstream.compute_loss(cut, upstream.loss_fn(**table), scale)[0]
    gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)  # 0 where it was not called
    return [loss.detach(), *gradients]


def drawn(seed: int) -> Pack:
    """A micro-batch of four sequences, one of a single token, with padding and now and then with weights."""
    spread = 1.0 if seed % 4 == 0 else 0.3
    samples = [drawn_inputs(seed + i, n, spread=spread) for i, n in enumerate((9, 1, 33, 5))]
    if seed % 2:
        for i, sample in enumerate(samples):
            sample["weights"] = 0.5 + 0.25 * torch.full_like(sample["advantages"], i)
    if seed % 3 == 0:
        # The other samples have no reference, and packing fills it.
        samples[0]["reference"] = samples[0]["trainer_logprobs"] - 0.1
    return packed(samples, padding=seed % 5)


LOSSES = "the loss module"


def compare(upstream: Upstream, own: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """One micro-batch, divided by some number of tokens, with the defaults or with other values."""
    options: Table = {}
    if flag(draw, "other values"):
        options = given(own, lambda option, values: draw.choose(values, option.key))
    pack, tokens = drawn(draw.integer(0, 2**20, "seed")), draw.integer(1, 500, "scale")
    theirs, ours = (compared(upstream, table, pack, tokens) for table in tables(own, options))
    largest = max(float(gradient.abs().max()) for gradient in theirs[1:])
    scale = max(float(theirs[0].abs()), 1e-3)
    yield Compared(ours[0], theirs[0], 60, max(60 * largest, 1e-3), scale=scale)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        # Within a token the policy's term and the KL's may cancel, so rounding is relative to the largest.
        yield Compared(a, b, 60, largest, what=GRADIENT, scale=largest)


def claims(upstream: Upstream) -> list[Claim]:
    """The claims about this checkout: one for each loss that it has."""
    return [
        Claim(
            "policy",
            own.row,
            own.options["type"],
            Place(LOSSES),
            partial(compare, upstream, own),
        )
        for own in PRIME_RL.losses
    ]
