"""Policy losses. Defaults are the kernels' own; a test holds the two together."""

import math

from composer_plugins.bundled.shared import KERNELS, LOG_RATIO_CLAMP, TINY
from composer_plugins.catalogue import Loss, Parameter

OLD = ("logprobs", "old_logprobs", "advantages", "mask")
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages", "mask")

DUAL_CLIP = Parameter(None, "bound on the loss where A < 0, in units of |A|; verl: 3.0", low=1)
RATIO_CAP = Parameter(None, "the ratio is capped here in the unclipped branch; TRL's delta", low=TINY)
WEIGHT_CAP = Parameter(None, "the ratio, as a weight, is capped here; Stable-RL 10, verl 3", low=TINY)


def clip(low: float, high: float) -> dict[str, Parameter]:
    """PPO's two clip ranges."""
    return {
        "clip_low": Parameter(low, "the ratio is clipped below at 1 - clip_low", low=0, high=1),
        "clip_high": Parameter(high, "the ratio is clipped above at 1 + clip_high", low=0),
    }


def region(what: str, default: float, high: float) -> dict[str, Parameter]:
    """DPPO's trust region, and its two clamps."""
    return {
        f"{what}_low": Parameter(default, "how far down a token may move (A < 0)", low=0, high=high),
        f"{what}_high": Parameter(default, "how far up a token may move (A > 0)", low=0, high=high),
        "ratio_cap": WEIGHT_CAP,
        "log_ratio_clamp": LOG_RATIO_CLAMP,
    }


LOSSES = (
    Loss(
        name="grpo",
        kind="policy",
        path=f"{KERNELS}.policy:grpo",
        summary="PPO's clip with group-relative advantages",
        paper="arXiv 2402.03300",
        needs=OLD,
        parameters=clip(0.2, 0.2)
        | {"ratio_cap": RATIO_CAP, "dual_clip": DUAL_CLIP, "log_ratio_clamp": LOG_RATIO_CLAMP},
        proof="TODO",
    ),
    Loss(
        name="dapo",
        kind="policy",
        path=f"{KERNELS}.policy:dapo",
        summary="GRPO with clip-higher and a token mean",
        paper="arXiv 2503.14476",
        needs=OLD,
        parameters=clip(0.2, 0.28),
        proof="TODO",
    ),
    Loss(
        name="dr_grpo",
        kind="policy",
        path=f"{KERNELS}.policy:dr_grpo",
        summary="GRPO without std and with a constant length",
        paper="arXiv 2503.20783",
        needs=OLD,
        parameters=clip(0.2, 0.2),
        proof="TODO",
    ),
    Loss(
        name="gspo",
        kind="policy",
        path=f"{KERNELS}.policy:gspo",
        summary="one length-normalised ratio per sequence",
        paper="arXiv 2507.18071",
        needs=OLD,
        parameters=clip(3e-4, 4e-4),
        proof="TODO",
    ),
    Loss(
        name="gspo_token",
        kind="policy",
        path=f"{KERNELS}.policy:gspo_token",
        summary="GSPO's ratio with each token's own gradient",
        paper="arXiv 2507.18071",
        needs=OLD,
        parameters=clip(3e-4, 4e-4)
        | {"log_ratio_cap": Parameter(None, "upper clamp on the log ratio, in nats; verl: 10.0", low=0)},
        proof="TODO",
    ),
    Loss(
        name="cispo",
        kind="policy",
        path=f"{KERNELS}.policy:cispo",
        summary="REINFORCE weighted by a clipped, detached ratio",
        paper="arXiv 2506.13585",
        needs=OLD,
        parameters={
            "clip_low": Parameter(None, "the weight is at least 1 - clip_low; None: no bound", low=0),
            "clip_high": Parameter(0.2, "the weight is at most 1 + clip_high", low=-1),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
        proof="TODO",
    ),
    Loss(
        name="dppo_tv",
        kind="policy",
        path=f"{KERNELS}.policy:dppo_tv",
        summary="REINFORCE while the token's probability stays near the rollout's",
        paper="arXiv 2602.04879",
        needs=ROLLOUT,
        optional=("region_logprobs",),
        parameters=region("tv", 0.2, 1),
        proof="TODO",
    ),
    Loss(
        name="dppo_kl",
        kind="policy",
        path=f"{KERNELS}.policy:dppo_kl",
        summary="as dppo_tv, measured by a Bernoulli KL",
        paper="arXiv 2602.04879",
        needs=ROLLOUT,
        optional=("region_logprobs",),
        parameters=region("kl", 0.05, math.inf),
        proof="TODO",
    ),
)
