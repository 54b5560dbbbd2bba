"""The metrics of one sequence, as PRIME-RL logs them: 0-dimensional float32, the same keys at every call.

The loss runs once per sequence, where the time depends on the number of operations. `Averages` therefore
collects masks and masked values, and sums all masks in one operation and all values in another.
"""

from collections.abc import Collection
from functools import cache

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin.upstream import METRICS
from composer_plugins.kernels.masking import below_overflow, keep
from composer_plugins.kernels.types import Metric

PREFIX = "composer/"
# What kernels call the tokens that a trust region drops or clips.
SIDES = (("mask_frac_low", "mask_frac_high"), ("clip_frac_low", "clip_frac_high"))
ZERO = ""  # the name of a sum that is 0

Quotient = tuple[str, str]  # a sum, and the mask whose count divides it


class Averages:
    """Masks, values that are 0 outside of a mask, and metrics, which are quotients of their sums."""

    def __init__(self, policy_mask: Tensor) -> None:
        self.masks: dict[str, Tensor] = {"policy": policy_mask}
        self.values: dict[str, Tensor] = {}
        self.quotients: dict[str, Quotient] = {}

    def mean(self, name: str, value: Tensor | None, over: str) -> None:
        """The mean of `value`, which is 0 outside of the mask `over`; the metric is 0 for None."""
        if value is not None:
            self.values[name] = value
        self.quotients[name] = (ZERO, ZERO) if value is None else (name, over)

    def fraction(self, name: str, mask: Tensor | None, over: str) -> None:
        """The fraction of the mask `over` that is in `mask`, a part of it; the metric is 0 for None."""
        if mask is not None:
            self.masks[name] = mask
        self.quotients[name] = (ZERO, ZERO) if mask is None else (name, over)

    def mismatch(self, logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The distance of trainer and rollout engine per token: k3, which is r - 1 - log r; and r - 1."""
        log_ratio = keep(logprobs.detach() - rollout_logprobs, self.masks["policy"])
        excess = below_overflow(log_ratio).expm1()
        kl = excess - log_ratio
        self.mean("mismatch_kl", kl, "policy")
        return kl, excess

    def trust_region(self, policy: dict[str, Metric], kl: Tensor) -> tuple[str, ...]:
        """The tokens that a trust region drops or clips, under PRIME-RL's names; the metrics used."""
        sides = next((s for s in SIDES if all(is_boolean(policy, name) for name in s)), None)
        if sides is None:
            return ()
        low, high = (policy[side].value & self.masks["policy"] for side in sides)
        masked = low | high
        dropped = keep(kl, masked)
        self.masks["kept"] = self.masks["policy"] ^ masked
        self.fraction("is_masked", masked, "policy")
        self.fraction("is_masked_low", low, "policy")
        self.fraction("is_masked_high", high, "policy")
        self.mean("masked_mismatch_kl", dropped, "is_masked")
        self.mean("unmasked_mismatch_kl", kl - dropped, "kept")
        return sides

    def of_kernel(self, policy: dict[str, Metric], reported: Collection[str]) -> None:
        """What else the policy loss reports, under its own name."""
        for name, (value, where) in policy.items():
            if name not in reported:
                self.masks[f"where {name}"] = where
                self.mean(f"policy/{name}", keep(value.float(), where), f"where {name}")

    def computed(self, excess: Tensor) -> dict[str, Tensor]:
        """Every metric in the order of the calls, then the ratio's two; 0 where there is nothing to average.

        `excess` is the ratio less 1, and 0 where masked. 1 is added to its mean and to its largest value.
        """
        self.values["excess"] = excess
        self.quotients |= {"ratio": ("excess", "policy"), "ratio_max": ("largest", ZERO)}
        names = (*self.masks, *self.values, "largest", ZERO)
        above, below, plus, zero = _layout(names, (*self.quotients.items(),), excess.device)
        counts = torch.stack([*self.masks.values()]).sum(-1)
        values = torch.stack([*self.values.values()]).sum(-1)
        sums = torch.cat([counts, values, excess.amax(-1, keepdim=True), zero])
        means = sums.index_select(0, above) / sums.index_select(0, below).clamp(min=1) + plus
        keys = [name if name in METRICS else PREFIX + name for name in self.quotients]
        return dict(zip(keys, means.float().unbind(), strict=True))


def is_boolean(policy: dict[str, Metric], name: str) -> bool:
    """Whether the loss reports this metric, as a fraction of tokens. A user's loss may report anything."""
    return name in policy and policy[name].value.dtype is torch.bool


@cache  # because a copy to the device waits for it
def _layout(
    names: tuple[str, ...], quotients: tuple[tuple[str, Quotient], ...], device: torch.device
) -> list[Tensor]:
    """For every quotient, where its two sums are and what is added to it; and the sum `ZERO`."""
    at = {name: i for i, name in enumerate(names)}
    above, below = ([at[pair[side]] for _, pair in quotients] for side in (0, 1))
    plus = [float(name in {"ratio", "ratio_max"}) for name, _ in quotients]
    return [torch.tensor(column, device=device) for column in (above, below, plus, [0.0])]
