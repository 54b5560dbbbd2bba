"""All claims about torchtitan's losses of RL, for the installed version: through `ComposerLoss` itself."""

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

from composer_plugins.conformance.claims import GRADIENT, Absent, Claim, Compared, Place
from composer_plugins.conformance.running import Suite
from composer_plugins.conformance.torchtitan_claims import upstream
from composer_plugins.frameworks.torchtitan import LOSS, TORCHTITAN
from composer_plugins.testing.draws import Draw, flag, generator

KNOWN = ("0.3.0",)
UNKNOWN = "this version of composer-plugins does not know it"
VALUES = {"clip_eps": [0.05, 0.5], "ratio_clip_low": [0.05, 0.9], "ratio_clip_high": [0.05, 0.28, 3.0]}
OF_CLASS = {"GRPOLoss": ("clip_eps",), "DAPOLoss": ("ratio_clip_low", "ratio_clip_high")}
VOCABULARY = 7
MAX_LOG_RATIO = 10.0  # of its losses: `_MAX_LOG_RATIO`, which is not an option
FLOAT32 = torch.float32


def micro_batch(draw: Draw) -> dict[str, Tensor]:
    """Packed rows [B, L]: padding, log ratios beyond torchtitan's clamp, and tokens that are not finite."""
    g = generator(draw)
    rows, tokens = draw.integer(1, 4, "rows"), draw.integer(1, 9, "tokens")
    shape = (rows, tokens)
    logits = draw.choose([0.3, 3.0], "scale") * torch.randn(*shape, VOCABULARY, generator=g)
    labels = torch.randint(0, VOCABULARY, shape, generator=g)
    logprobs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    spread = draw.choose([0.0, 0.3, 2.0, 2 * MAX_LOG_RATIO], "log-ratio spread")
    old = (logprobs + spread * torch.randn(shape, generator=g)).clamp(max=0)
    if flag(draw, "tokens that are not finite"):
        old = torch.where(torch.rand(shape, generator=g) < 0.2, torch.nan, old)
    return {
        "logits": logits,
        "labels": labels,
        "generator_logprobs": old,
        "advantages": torch.randn(shape, generator=g),
        "loss_mask": torch.rand(shape, generator=g) < draw.choose([0.5, 1.0], "unmasked"),
    }


def compare(name: str, draw: Draw) -> Iterator[Compared]:
    """One micro-batch of a larger step, with the defaults of the class or with its options drawn."""
    from composer_plugins.adapters.torchtitan_loss.loss import ComposerLoss

    options: dict[str, float] = {}
    if flag(draw, "other values"):
        options = {key: draw.choose(VALUES[key], key) for key in OF_CLASS[name]}
    batch, row = micro_batch(draw), upstream.row_of(name)
    tokens = int(batch["loss_mask"].sum()) + draw.integer(0, 50, "tokens elsewhere")
    config = ComposerLoss.Config(policy=row, policy_params=upstream.our_params(row, options))
    ours = upstream.called(config.build(), batch, tokens)
    theirs = upstream.called(upstream.loss_class(name).Config(**options).build(), batch, tokens)
    old = batch["generator_logprobs"].nan_to_num()
    largest = float((torch.exp((-old).clamp(max=MAX_LOG_RATIO)) * batch["advantages"].abs()).max())
    yield Compared(ours[0], theirs[0], batch["labels"].numel(), largest / max(tokens, 1), FLOAT32)
    yield Compared(ours[1], theirs[1], 2, max(float(theirs[1].abs().max()), 1e-9), FLOAT32, GRADIENT)


def suite() -> Suite:
    """The claims, and which losses the installed torchtitan has."""
    here = upstream.classes()
    claims = [
        Claim(
            "policy",
            one.row,
            one.options[LOSS],
            Place(one.options[LOSS]),
            partial(compare, one.options[LOSS]),
        )
        for one in TORCHTITAN.losses
    ]

    def absent() -> Iterator[Absent]:
        for name in sorted(here - {claim.theirs for claim in claims}):
            yield Absent(name, UNKNOWN, missing=True)

    return Suite(version("torchtitan"), KNOWN, claims, lambda place: place.where in here, absent)
