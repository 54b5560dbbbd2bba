"""PRIME-RL's own losses as formulas, with its defaults, so that `conform` runs where no checkout of it is.

The losses up to 559b447 equal ours (`live/prime_rl/test_conform.py`), which equal its recorded numbers. The
later ones are written from its documentation and source text.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import loss_fn
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.frameworks.prime_rl import GENERATIONS, Generation
from parity_tests.rigs import prime_rl_doubles as doubles


@dataclass
class Outputs:
    """What a loss returns."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Sequence:
    """The fields of LossInputs, and what the formulas are made of, [tokens] each."""

    def __init__(self, inputs: Any) -> None:
        self.logprobs, self.mask = inputs.trainer_logprobs, inputs.loss_mask
        self.advantages = inputs.advantages
        self.log_ratio = self.logprobs - inputs.inference_logprobs
        self.ratio = self.log_ratio.exp()
        self.shift = self.logprobs.detach().exp() - inputs.inference_logprobs.exp()
        teacher = getattr(inputs, "teacher_logprobs", None)
        self.to_teacher = 0.0 if teacher is None else teacher - self.logprobs.detach()
        weights = getattr(inputs, "loss_weights", None)
        self.weights = torch.ones_like(self.logprobs) if weights is None else weights

    def capped(self, cap: float) -> Tensor:
        """The ratio, its value capped, with the gradient of exp."""
        value = self.log_ratio.detach().clamp(max=math.log(cap))
        return (value + self.log_ratio - self.log_ratio.detach()).exp()


def v0_4(
    x: Sequence,
    token_mask_low: float = 0.125,
    token_mask_high: float = 8.0,
    geo_mask_low: float = 0.1,
    geo_mask_high: float = 10.0,
    sequence_mask_low: float = 0.0,
    sequence_mask_high: float = 100.0,
    sequence_clip_high: float = 10.0,
    adv_tau: float = 1.0,
    teacher_tau: float = 0.0,
    kl_tau: float = 0.0,
) -> Tensor:
    """A masked ratio per token, and masks for whole sequences; the whole coefficient is detached.

    `sequence_clip_high` acts with ratio_type = "sequence" alone, which is not here.
    """
    r = x.ratio.detach()
    inside = r[x.mask] if x.mask.any() else torch.ones_like(r[:1])
    geo = inside.log().mean().exp()
    kept = (r >= token_mask_low) & (r <= token_mask_high) & (geo >= geo_mask_low) & (geo <= geo_mask_high)
    kept &= (inside.min() >= sequence_mask_low) & (inside.max() <= sequence_mask_high)
    advantages = adv_tau * x.advantages + teacher_tau * x.to_teacher - kl_tau * x.log_ratio.detach()
    return torch.where(kept, -r * advantages * x.logprobs, 0.0)


def v0_5(
    x: Sequence,
    ipo_mask_low: float = 0.2,
    ipo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    teacher_tau: float = 0.0,
    kl_tau: float = 1e-3,
) -> Tensor:
    """IPO of that time: a token is dropped by the change of its probability."""
    kept = (x.shift >= -ipo_mask_low) & (x.shift <= ipo_mask_high)
    advantages = adv_tau * x.advantages + teacher_tau * x.to_teacher
    return torch.where(kept, -advantages * x.ratio, 0.0) + kl_tau * x.log_ratio**2


def dppo(
    x: Sequence,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> Tensor:
    """The default of 0.6 to 559b447: the sign of the advantage says on which side a token is dropped."""
    dropped = torch.where(x.advantages > 0, x.shift > dppo_mask_high, x.shift < -dppo_mask_low)
    return torch.where(dropped, 0.0, -adv_tau * x.advantages * x.ratio) + kl_tau * x.log_ratio**2


def ipo(x: Sequence, ipo_threshold: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3) -> Tensor:
    """IPO of 0.6 to 559b447."""
    dropped = x.shift.abs() > ipo_threshold
    return torch.where(dropped, 0.0, -adv_tau * x.advantages * x.ratio) + kl_tau * x.log_ratio**2


def ipo_3418(x: Sequence, eps: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3) -> Tensor:
    """IPO with another name of its threshold."""
    return ipo(x, eps, adv_tau, kl_tau)


def ipo_3586(x: Sequence, eps: float = 0.3, adv_tau: float = 1.0, kl_tau: float = 0.0) -> Tensor:
    """IPO with other defaults."""
    return ipo(x, eps, adv_tau, kl_tau)


def ipo_newest(
    x: Sequence, eps: float = 0.3, max_importance_ratio: float = 1e4, adv_tau: float = 1.0
) -> Tensor:
    """IPO without a KL term, with a cap."""
    return torch.where(x.shift.abs() > eps, 0.0, -adv_tau * x.advantages * x.capped(max_importance_ratio))


def icepop(x: Sequence, ratio_low: float = 0.2, ratio_high: float = 5.0, adv_tau: float = 1.0) -> Tensor:
    """A masked ratio."""
    kept = (x.ratio >= ratio_low) & (x.ratio <= ratio_high)
    return torch.where(kept, -adv_tau * x.advantages * x.ratio, 0.0)


def ppo(
    x: Sequence,
    ratio_low: float = 0.8,
    ratio_high: float = 1.2,
    max_importance_ratio: float = 1e4,
    adv_tau: float = 1.0,
) -> Tensor:
    """The clipped surrogate; the bounds are those of the ratio itself."""
    scaled = adv_tau * x.advantages
    return -torch.minimum(
        scaled * x.capped(max_importance_ratio), scaled * x.ratio.clamp(ratio_low, ratio_high)
    )


def cispo(x: Sequence, ratio_low: float = 0.0, ratio_high: float = 5.0, adv_tau: float = 1.0) -> Tensor:
    """The clipped ratio as a detached weight."""
    return -x.ratio.detach().clamp(ratio_low, ratio_high) * adv_tau * x.advantages * x.logprobs


Formula = Callable[..., Tensor]
_TO_559B447: dict[str, Formula] = {"default": dppo, "ipo": ipo}
FORMULAS: dict[str, dict[str, Formula]] = {
    "0.4": {"default": v0_4},
    "0.5": {"default": v0_5},
    **dict.fromkeys(("0.6", "0.7", "0.8.1.dev52"), _TO_559B447),
    "#3418": {"ipo": ipo_3418},
    "#3526": {"ipo": ipo_3418, "icepop": icepop},
    "#3586": {"ipo": ipo_3586, "icepop": icepop},
    "after #3586": {"ipo": ipo_newest, "icepop": icepop, "ppo": ppo, "cispo": cispo},
}


@dataclass(frozen=True)
class Double:
    """A generation of PRIME-RL in the place of a checkout (`prime_rl_claims.upstream.Upstream`)."""

    generation: Generation

    @property
    def version(self) -> str:
        """The recorded release that packs and weighs in the same way."""
        return {"0.4": "v0.4.0", "0.5": "v0.5.0", "0.6": "v0.6.0"}.get(self.generation.since, "v0.8.0")

    def loss_fn(self, **table: Any) -> Callable[[Any], Any]:
        """The function for `[trainer.loss]`. TypeError for an option that the loss does not have."""
        kind, *_ = table.pop("type"), table.pop("import_path", None)
        if kind == "custom":
            return partial(loss_fn, **table["kwargs"])
        formula = partial(FORMULAS[self.generation.since][kind], **table)

        def own(inputs: Any) -> Outputs:
            x = Sequence(inputs)
            return Outputs(torch.where(x.mask, formula(x) * x.weights, 0.0).sum(), {})

        return own

    def compute_loss(self, pack: Pack, fn: Any, scale: int) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch as the trainer sums and divides it."""
        return doubles.compute_loss(doubles.GENERATIONS[self.version], pack, fn, scale)


DOUBLES = {one.since: Double(one) for one in GENERATIONS}
