"""What is measured of a batch: sums over its tokens and rows, which stay on the device.

The sums of several micro-batches are added up before anything is divided (`Window`), so the number of
micro-batches changes nothing. Log-ratios are log pi_trainer - log pi_other, in nats, on the sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from composer_plugins.kernels.types import Metric

LARGEST = "max "  # how the names of largest values begin; the other values are sums
MOVED = 1e-5  # nats; a log-ratio below it is 0 but for the rounding of float32
ABOVE_ONE = 0.01  # nats; a sampler that cuts its distribution gives no token less than the trainer does
CERTAIN = -1.0  # nats; top_p leaves a token that is alone 0 from the sampler and log(top_p) from the trainer
OUTSIDE = 0.6931472  # nats: a ratio below 0.5 or above 2
CLAMP = 20.0  # nats; exp(2 * 20) is finite in float32
CHANGED = ("clip_frac", "mask_frac")  # how our metrics begin that mark the tokens of a clip or a mask


def token_sums(
    tensors: Mapping[str, Tensor | None], metrics: Mapping[str, Metric] | None = None
) -> dict[str, Tensor]:
    """Return the sums of a micro-batch, by name, as 0-dimensional tensors on its device.

    `tensors` are [rows, tokens] or [tokens] by their names in `losses.inputs.INPUTS`: "mask" and "logprobs",
    and of the others those that there are. "hint_mask" says where "teacher_logprobs" counts, "replay_mask"
    which tokens are of pairs. `metrics` are the metrics of the loss. Nothing waits for the device.
    """
    given = {name: x.detach() for name, x in tensors.items() if x is not None}
    mask, logprobs = given["mask"], given["logprobs"].float()
    rows = mask.any(-1).sum()
    found = {"rows": rows, "empty rows": mask.numel() // max(mask.shape[-1], 1) - rows}
    # Of each token, values and whether something holds, whose sums over the mask are taken below.
    each, holds = dict[str, Tensor](), {"tokens": mask}
    is_old = tensors.get("rollout_logprobs") is tensors.get("old_logprobs")  # the ratios are then one
    names = ("rollout_logprobs", *(() if is_old else ("old_logprobs",)), "ref_logprobs")
    others = [name for name in names if name in given]
    own, *of_others = torch.where(mask, torch.stack([logprobs, *(given[one] for one in others)]), 0.0)
    unmasked = dict(zip(others, of_others, strict=True))
    if mask.dim() > 1:  # two rows of 8 tokens and more with one sum, which is not 0, are the same rollout
        sums = own.sum(-1)
        sums = sums.where((mask.sum(-1) >= 8) & (sums < CERTAIN), torch.nan)
        found["repeated rows"] = (sums.sort().values.diff() < 1e-3).sum()
    if (rollout := unmasked.get("rollout_logprobs")) is not None:
        gap = (own - rollout).clamp(-CLAMP, CLAMP)
        ratio, sampled = gap.exp(), rollout.clamp(min=-CLAMP)
        each |= {"kl": -gap, "k3": gap.expm1() - gap, "ratio": ratio, "chi2": ratio.square() - 1}
        each["gap squared"] = gap.square()
        each |= {"sampled": sampled, "sampled squared": sampled.square(), "sampled times gap": sampled * gap}
        size = gap.abs()
        holds |= {"ratio outside": size > OUTSIDE, "ratio above 1": gap > ABOVE_ONE}
        holds |= {"moved": size > MOVED} if is_old else {}
        holds["not sampled"] = (rollout == 0) & (own < CERTAIN)
    if (old := unmasked.get("old_logprobs")) is not None:
        holds["moved"] = (own - old).abs() > MOVED
    if changes := [x for name, x in (metrics or {}).items() if name.startswith(CHANGED)]:
        changed = reduce(torch.logical_or, [x.value.bool() & x.where for x in changes])
        holds["clipped"] = changed.expand(mask.shape)
    if (advantages := given.get("advantages")) is not None:
        advantages = torch.where(mask, advantages, 0.0)
        silent = advantages == 0
        high = torch.where(silent, -torch.inf, advantages).amax(-1, keepdim=True)
        low = torch.where(silent, torch.inf, advantages).amin(-1, keepdim=True)
        holds |= {"holes": (high == low) & silent, "silent": silent}
        found[f"{LARGEST}advantage"] = advantages.abs().amax()
        if (alike := given.get("alike")) is not None:  # rows of groups whose rewards are all equal
            found["alike"] = (alike & (advantages.abs().amax(-1) > 0.01)).sum()
    if (entropies := given.get("entropies")) is not None:
        each["surprise"] = torch.where(mask, -own - entropies, 0.0)
        found["surprise squared"] = each["surprise"].sum(-1).square().sum()
    if (reference := unmasked.get("ref_logprobs")) is not None:
        gap = (own - reference).clamp(-CLAMP, CLAMP)
        each["reference k3"] = gap.expm1() - gap
        found[f"{LARGEST}reference gap"] = gap.abs().amax()
    teacher, hinted = given.get("teacher_logprobs"), given.get("hint_mask", mask)
    if (replayed := given.get("replay_mask")) is not None:
        found["replay tokens"] = replayed.sum()
    if teacher is not None:
        gap = torch.where(hinted, teacher - logprobs, 0.0).clamp(-CLAMP, CLAMP)
        found |= {"hint tokens": hinted.sum(), f"{LARGEST}teacher gap": gap.abs().amax()}
        if advantages is not None:
            agreement = (advantages * gap).sum(-1)
            found |= {"agreement": agreement.sum(), "agreement squared": agreement.square().sum()}
    counts = (torch.stack([*holds.values()]) & mask).flatten(1).sum(1)
    found |= zip(holds, counts.unbind(), strict=True)
    if each:
        values = torch.where(mask, torch.stack([*each.values()]), 0.0).flatten(1).sum(1)
        found |= zip(each, values.unbind(), strict=True)
    return found


def gradient_sums(gradient: Tensor) -> dict[str, Tensor]:
    """Return the sums of the gradient of a micro-batch's loss with respect to its log-probabilities."""
    sizes = gradient.detach().float().abs()
    return {"gradient": sizes.sum(), "gradient tokens": (sizes > 0).sum(), f"{LARGEST}gradient": sizes.amax()}


# By the name under which a framework logs it, the sum over tokens whose mean is the metric.
METRICS = {"kl": "kl", "k3_kl": "k3", "ratio_mean": "ratio", "ratio_outside_frac": "ratio outside"}
METRICS |= {"chi2": "chi2", "clip_frac": "clipped", "zero_adv_frac": "silent", "surprise": "surprise"}


def logged(sums: Mapping[str, Tensor], *, equal: bool = True) -> dict[str, Tensor]:
    """Return the metrics of these sums, 0-dimensional on their device; surprise at equal weights alone."""
    tokens = sums["tokens"].clamp(min=1)
    known = {name: of for name, of in METRICS.items() if of in sums and (equal or name != "surprise")}
    return {name: sums[of] / tokens for name, of in known.items()}


@dataclass
class Window:
    """The sums of several micro-batches, on the host; `window["kl"]` is 0 where nothing has measured it."""

    sums: dict[str, float] = field(default_factory=dict)
    update: int | None = None  # of the weights, in which it ends
    baseline: float = 0.0  # the smallest k3 per token of the windows before it, in which the policy had moved

    def __getitem__(self, name: str) -> float:
        return self.sums.get(name, 0.0)

    def __contains__(self, name: str) -> bool:
        return name in self.sums

    def add(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Add the values of a micro-batch, or of a step."""
        for name, value in zip(names, values, strict=True):
            before = self.sums.get(name, 0.0)
            self.sums[name] = max(before, value) if name.startswith(LARGEST) else before + value

    def mean(self, name: str, over: str = "tokens") -> float:
        """The mean of a sum over tokens, or over another count."""
        return self[name] / max(self[over], 1.0)

    def z(self, name: str) -> float:
        """The sum of a value whose expectation is 0 in each row, in standard errors over the rows."""
        return float(self[name] / max(self[f"{name} squared"], 1e-12) ** 0.5)

    @property
    def spread(self) -> tuple[float, float, float]:
        """The variance of the sampler's log-probability, of the log-ratio, and their covariance."""
        n, x, y = max(self["tokens"], 1.0), self["sampled"], -self["kl"]
        variances = (self["sampled squared"] - x * x / n) / n, (self["gap squared"] - y * y / n) / n
        return *variances, (self["sampled times gap"] - x * y / n) / n

    @property
    def by_temperature(self) -> float:
        """The share of the log-ratio's variance that is linear in the sampler's log-probability."""
        sampler, gap, covariance = self.spread
        return covariance**2 / max(sampler * gap, 1e-12)

    @property
    def correlation(self) -> float:
        """The correlation of the two log-probabilities; 1 where one of them does not vary."""
        sampler, gap, covariance = self.spread
        product = sampler * (sampler + 2 * covariance + gap)
        return float((sampler + covariance) / product**0.5) if product > 1e-12 else 1.0

    @property
    def effective_sample_size(self) -> float:
        """(sum r)^2 / (N sum r^2), a fraction of the tokens."""
        return self["ratio"] ** 2 / max(self["tokens"] * (self["chi2"] + self["tokens"]), 1e-12)
