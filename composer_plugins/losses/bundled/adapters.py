"""The frameworks we have an adapter for, and the inputs that each of them provides for a kernel."""

from composer_plugins.adapter import Adapter

TRL = Adapter(
    framework="trl",
    path="composer_plugins.adapters.trl_mixin:ComposerGRPOTrainer",
    summary="TRL's GRPOTrainer with any policy loss, a hint channel and a replay channel",
    provides={
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "old_logprobs"}
            | {"mask"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected"}),
    },
    partial_batch=dict.fromkeys(("policy", "preference"), "TRL cuts the batch into micro-batches"),
)

PRIME_RL = Adapter(
    framework="prime-rl",
    path="composer_plugins.adapters.prime_rl_plugin:loss_fn",
    summary="a loss_fn for trainer.loss.import_path: any policy loss, sampled-token hints, replay pairs",
    provides={
        # old_logprobs with `old_policy`: the rollout engine's or the policy's own
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"support_logprobs", "rollout_support_logprobs", "mask"}
        ),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "mask"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
    partial_batch=dict.fromkeys(
        ("policy", "divergence", "correction"), "PRIME-RL calls a loss with one sequence at a time"
    ),
)

VERL = Adapter(
    framework="verl",
    path="composer_plugins.adapters.verl_plugin.register:register",
    summary="verl's registries: estimators and policy losses; its trainer composer_sync: hint and replay",
    provides={
        # verl's old_log_prob is given as the rollout policy's too, as verl's own DPPO is
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "advantage": frozenset({"rewards", "group_ids", "lengths", "token_rewards", "mask"}),
        # of trainer_mode composer_sync; logits are those of the teacher's hint_top_k entries and a tail
        "divergence": frozenset(
            {"student_logits", "teacher_logits", "student_logprobs", "teacher_logprobs", "mask"}
            | {"teacher_topk_logprobs", "teacher_topk_ids", "old_logprobs"}
        ),
        "preference": frozenset({"chosen", "rejected", "ref_chosen", "ref_rejected"}),
    },
    partial_batch={
        "policy": "verl cuts the batch into micro-batches",
        "preference": "it sorts the batch's pairs anew, so a pair's weight would go to another pair",
    },
)

ADAPTERS = (TRL, PRIME_RL, VERL)
