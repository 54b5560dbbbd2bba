"""What one watches while PRIME-RL trains, as it logs it: one 0-dimensional float32 per sequence and key.

`loss_fn` runs once per sequence, where the number of operations is what costs. So a metric is not averaged by
itself: `Watched` collects masks and masked values, and sums each kind in one operation.
"""

from functools import cache

import torch
from torch import Tensor

from composer_plugins.kernels.contract import Metric
from composer_plugins.kernels.masking import below_overflow, keep

PREFIX = "composer/"
SIDES = (("masked_low", "masked_high"), ("clip_low", "clip_high"))  # what kernels call what they drop
NOTHING = ""  # a sum that is 0

Quotient = tuple[str, str]  # a sum, and the mask whose count it is divided by


class Watched:
    """Masks, values that are 0 outside of one, and which quotient of two sums is which metric."""

    def __init__(self, live: Tensor) -> None:
        self.masks: dict[str, Tensor] = {"live": live}
        self.values: dict[str, Tensor] = {}
        self.quotients: dict[str, Quotient] = {}

    def mean(self, name: str, value: Tensor | None, over: str) -> None:
        """The mean of `value`, which is 0 outside of the mask `over`; 0 for None."""
        if value is not None:
            self.values[name] = value
        self.quotients[name] = (NOTHING, NOTHING) if value is None else (name, over)

    def fraction(self, name: str, mask: Tensor | None, over: str) -> None:
        """How many of the mask `over` are in `mask`, which is a part of it; 0 for None."""
        if mask is not None:
            self.masks[name] = mask
        self.quotients[name] = (NOTHING, NOTHING) if mask is None else (name, over)

    def averaged(self, excess: Tensor) -> dict[str, Tensor]:
        """Every metric in the order they came, 0 where there is nothing to average; the ratio's last.

        `excess` is the ratio less 1, and 0 where masked: so is its largest.
        """
        self.values["excess"] = excess
        self.quotients |= {"ratio": ("excess", "live"), "ratio_max": ("largest", NOTHING)}
        counts = torch.stack([*self.masks.values()]).sum(-1)
        values = torch.stack([*self.values.values()]).sum(-1)
        sums = torch.cat([counts, values, excess.amax(-1, keepdim=True), _zero(values.dtype, values.device)])
        names = (*self.masks, *self.values, "largest", NOTHING)
        above, below, plus = _layout(names, (*self.quotients.items(),), values.device)
        means = sums.index_select(0, above) / sums.index_select(0, below).clamp(min=1) + plus
        return dict(zip(_prefixed((*self.quotients,)), means.float().unbind(), strict=True))


# Made once: a copy to the device waits for it.


@cache
def _layout(
    names: tuple[str, ...], quotients: tuple[tuple[str, Quotient], ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of every quotient, where in the sums its two are, and what is added to it."""
    at = {name: i for i, name in enumerate(names)}
    above, below = ([at[pair[side]] for _, pair in quotients] for side in (0, 1))
    plus = [float(name in {"ratio", "ratio_max"}) for name, _ in quotients]
    return tuple(torch.tensor(column, device=device) for column in (above, below, plus))  # type: ignore[return-value]


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=dtype, device=device)


@cache
def _prefixed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{name}" for name in names)


def forget() -> None:
    """Drop what was made for a device: for tests under fake tensors."""
    _layout.cache_clear()
    _zero.cache_clear()


def mismatch(
    watched: Watched, logprobs: Tensor, rollout_logprobs: Tensor, live: Tensor
) -> tuple[Tensor, Tensor]:
    """How far the trainer is from the rollout engine, per live token: k3, r - 1 - log r; and r - 1."""
    log_ratio = keep(logprobs.detach() - rollout_logprobs, live)
    excess = below_overflow(log_ratio).expm1()
    kl = excess - log_ratio
    watched.mean("mismatch_kl", kl, "live")
    return kl, excess


def region(watched: Watched, policy: dict[str, Metric], kl: Tensor, live: Tensor) -> None:
    """What a trust region dropped or clipped, under PRIME-RL's names for it; nothing if there is none."""
    sides = next((s for s in SIDES if s[0] in policy), None)
    if sides is None:
        return
    low, high = (policy[side].value & live for side in sides)
    masked = low | high
    dropped = keep(kl, masked)
    watched.masks["kept"] = live ^ masked
    watched.fraction("is_masked", masked, "live")
    watched.fraction("is_masked_low", low, "live")
    watched.fraction("is_masked_high", high, "live")
    watched.mean("masked_mismatch_kl", dropped, "is_masked")
    watched.mean("unmasked_mismatch_kl", kl - dropped, "kept")


def kernel(watched: Watched, policy: dict[str, Metric], known: set[str]) -> None:
    """What else the policy loss reports, under its name."""
    for name, (value, where) in policy.items():
        if name not in known:
            watched.masks[f"where {name}"] = where
            watched.mean(f"policy/{name}", keep(value.float(), where), f"where {name}")
