"""The frameworks we have an adapter for, and what each of them can feed a kernel with."""

from composer_plugins.adapter import Adapter

TRL = Adapter(
    framework="trl",
    path="composer_plugins.adapters.trl_mixin:ComposerGRPOTrainer",
    summary="TRL's GRPOTrainer with any policy loss, a hint channel and a replay channel",
    provides={
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "mask"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected"}),
    },
)

ADAPTERS = (TRL,)
