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

PRIME_RL = Adapter(
    framework="prime-rl",
    path="composer_plugins.adapters.prime_rl_loss:loss_fn",
    summary="a loss_fn for trainer.loss.import_path: any policy loss, sampled-token hints, replay pairs",
    provides={
        # old_logprobs with `anchor`: the rollout engine's or the policy's own
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"mask"}
        ),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "mask"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
)

VERL = Adapter(
    framework="verl",
    path="composer_plugins.adapters.verl_plugin.registration:register",
    summary="verl's registries: estimators and policy losses; its trainer composer_sync: hint and replay",
    provides={
        # verl's old_log_prob is given as the rollout policy's too, as verl's own DPPO is
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "advantage": frozenset({"rewards", "group_ids", "lengths", "token_rewards", "baselines", "mask"}),
        # of trainer_mode composer_sync; logits are those of the teacher's hint_top_k entries and a tail
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "mask"}
            | {"teacher_topk_logprobs", "teacher_topk_ids", "old_logprobs"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected"}),
    },
)

ADAPTERS = (TRL, PRIME_RL, VERL)
