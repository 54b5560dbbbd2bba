"""The losses this distribution brings. Defaults are the kernels' own; a test holds the two together."""

import math
from collections.abc import Callable

from composer_plugins.catalogue import Loss, Parameter
from composer_plugins.hookspecs import hookimpl

KERNELS = "composer_plugins.kernels"
TINY = math.ulp(0.0)  # the least positive number: "above zero"

OLD = ("logprobs", "old_logprobs", "advantages")
ROLLOUT = ("logprobs", "rollout_logprobs", "advantages")
LOGITS = ("student_logits", "teacher_logits")

DUAL_CLIP = Parameter(None, "bound on the loss where A < 0, in units of |A|; verl: 3.0", low=1)
RATIO_CAP = Parameter(None, "the ratio is capped here in the unclipped branch; TRL's delta", low=TINY)
WEIGHT_CAP = Parameter(None, "the ratio, as a weight, is capped here; Stable-RL 10, verl 3", low=TINY)
LOG_RATIO_CLAMP = Parameter(None, "clamp on the log ratio, in nats; verl: 20.0", low=TINY)
LABEL_SMOOTHING = Parameter(0.0, "chance that a preference is labelled the wrong way", low=0, high=0.5)
TEMPERATURE = Parameter(1.0, "divides both logits", low=1e-3)


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
        "grpo",
        "policy",
        f"{KERNELS}.policy:grpo",
        "PPO's clip with group-relative advantages",
        "arXiv 2402.03300",
        OLD,
        clip(0.2, 0.2) | {"ratio_cap": RATIO_CAP, "dual_clip": DUAL_CLIP, "log_ratio_clamp": LOG_RATIO_CLAMP},
    ),
    Loss(
        "dapo",
        "policy",
        f"{KERNELS}.policy:dapo",
        "GRPO with clip-higher and a token mean",
        "arXiv 2503.14476",
        OLD,
        clip(0.2, 0.28),
    ),
    Loss(
        "dr_grpo",
        "policy",
        f"{KERNELS}.policy:dr_grpo",
        "GRPO without std and with a constant length",
        "arXiv 2503.20783",
        OLD,
        clip(0.2, 0.2),
    ),
    Loss(
        "gspo",
        "policy",
        f"{KERNELS}.policy:gspo",
        "one length-normalised ratio per sequence",
        "arXiv 2507.18071",
        OLD,
        clip(3e-4, 4e-4),
    ),
    Loss(
        "gspo_token",
        "policy",
        f"{KERNELS}.policy:gspo_token",
        "GSPO's ratio with each token's own gradient",
        "arXiv 2507.18071",
        OLD,
        clip(3e-4, 4e-4)
        | {"log_ratio_cap": Parameter(None, "upper clamp on the log ratio, in nats; verl: 10.0", low=0)},
    ),
    Loss(
        "cispo",
        "policy",
        f"{KERNELS}.policy:cispo",
        "REINFORCE weighted by a clipped, detached ratio",
        "arXiv 2506.13585",
        OLD,
        {
            "clip_low": Parameter(None, "the weight is at least 1 - clip_low; None: no bound", low=0),
            "clip_high": Parameter(0.2, "the weight is at most 1 + clip_high", low=-1),
            "log_ratio_clamp": LOG_RATIO_CLAMP,
        },
    ),
    Loss(
        "dppo_tv",
        "policy",
        f"{KERNELS}.policy:dppo_tv",
        "REINFORCE while the token's probability stays near the rollout's",
        "arXiv 2602.04879",
        ROLLOUT,
        region("tv", 0.2, 1),
    ),
    Loss(
        "dppo_kl",
        "policy",
        f"{KERNELS}.policy:dppo_kl",
        "as dppo_tv, measured by a Bernoulli KL",
        "arXiv 2602.04879",
        ROLLOUT,
        region("kl", 0.05, math.inf),
    ),
    Loss(
        "forward_kl",
        "divergence",
        f"{KERNELS}.divergences:forward_kl",
        "KL(teacher || student), full vocabulary",
        "arXiv 2306.13649",
        LOGITS,
        {"temperature": TEMPERATURE},
    ),
    Loss(
        "reverse_kl",
        "divergence",
        f"{KERNELS}.divergences:reverse_kl",
        "KL(student || teacher), full vocabulary",
        "arXiv 2306.08543",
        LOGITS,
        {"temperature": TEMPERATURE},
    ),
    Loss(
        "jsd",
        "divergence",
        f"{KERNELS}.divergences:jsd",
        "generalized Jensen-Shannon divergence, full vocabulary",
        "arXiv 2306.13649",
        LOGITS,
        {
            "beta": Parameter(0.5, "the teacher's weight: 0 forward KL, 1 reverse KL", low=0, high=1),
            "temperature": TEMPERATURE,
        },
    ),
    Loss(
        "sampled_token",
        "divergence",
        f"{KERNELS}.divergences:sampled_token",
        "reverse KL from the sampled token alone, score-function form",
        "arXiv 2601.20802",
        ("student_logprobs", "teacher_logprobs"),
        {},
    ),
    Loss(
        "dpo",
        "preference",
        f"{KERNELS}.preference:dpo",
        "DPO, and cDPO with label_smoothing",
        "arXiv 2305.18290",
        ("chosen", "rejected", "ref_chosen", "ref_rejected"),
        {
            "beta": Parameter(0.1, "how strongly the reference holds", low=TINY),
            "label_smoothing": LABEL_SMOOTHING,
        },
    ),
    Loss(
        "simpo",
        "preference",
        f"{KERNELS}.preference:simpo",
        "reference-free, length-averaged, with a target margin",
        "arXiv 2405.14734",
        ("chosen", "rejected"),
        {
            "beta": Parameter(2.0, "scale of the length-averaged margin", low=TINY),
            "gamma_beta_ratio": Parameter(0.25, "target margin gamma over beta", low=0),
            "label_smoothing": LABEL_SMOOTHING,
            "link": Parameter("sigmoid", "how the margin becomes a loss", choices=("sigmoid", "hinge")),
        },
        average=True,
    ),
)


@hookimpl
def register_losses(register: Callable[[Loss], None]) -> None:
    """Register every bundled loss."""
    for loss in LOSSES:
        register(loss)
