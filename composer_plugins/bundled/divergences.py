"""Distillation divergences."""

from composer_plugins.bundled.shared import KERNELS, TEMPERATURE
from composer_plugins.catalogue import Loss, Parameter

LOGITS = ("student_logits", "teacher_logits", "mask")

LOSSES = (
    Loss(
        name="forward_kl",
        kind="divergence",
        path=f"{KERNELS}.divergences:forward_kl",
        summary="KL(teacher || student), full vocabulary",
        paper="arXiv 2306.13649",
        needs=LOGITS,
        parameters={"temperature": TEMPERATURE},
        proof="TODO",
    ),
    Loss(
        name="reverse_kl",
        kind="divergence",
        path=f"{KERNELS}.divergences:reverse_kl",
        summary="KL(student || teacher), full vocabulary",
        paper="arXiv 2306.08543",
        needs=LOGITS,
        parameters={"temperature": TEMPERATURE},
        proof="TODO",
    ),
    Loss(
        name="jsd",
        kind="divergence",
        path=f"{KERNELS}.divergences:jsd",
        summary="generalized Jensen-Shannon divergence, full vocabulary",
        paper="arXiv 2306.13649",
        needs=LOGITS,
        parameters={
            "beta": Parameter(0.5, "the teacher's weight: 0 forward KL, 1 reverse KL", low=0, high=1),
            "temperature": TEMPERATURE,
        },
        proof="TODO",
    ),
    Loss(
        name="sampled_token",
        kind="divergence",
        path=f"{KERNELS}.divergences:sampled_token",
        summary="reverse KL from the sampled token alone, score-function form",
        paper="arXiv 2601.20802",
        needs=("student_logprobs", "teacher_logprobs", "mask"),
        parameters={},
        proof="TODO",
    ),
)
