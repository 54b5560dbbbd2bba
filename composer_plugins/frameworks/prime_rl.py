"""PRIME-RL: the names of its options, and what its custom loss is called with."""

from composer_plugins.frameworks.contract import MINUS_ONE, ONE_MINUS, Framework, Sets

TV_LOW, TV_HIGH = Sets(("tv_low",)), Sets(("tv_high",))
CLIPPED = (
    "ppo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "gspo_token",
    "luspo",
    "cispo",
    "minirl",
    "opsm",
    "clip_cov",
)
CAPPED = ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl", "ipo", "ipo_centered", "minirl", "masked_is")

# Of [trainer.loss], in all releases.
NAMES = {
    **dict.fromkeys(("dppo_mask_low", "ipo_mask_low"), (TV_LOW,)),
    **dict.fromkeys(("dppo_mask_high", "ipo_mask_high"), (TV_HIGH,)),
    **dict.fromkeys(("ipo_threshold", "eps"), (Sets(("tv_low", "tv_high")),)),
    "ratio_low": (Sets(("token_low",), ("masked_is",)), Sets(("clip_low",), CLIPPED, ONE_MINUS)),
    "ratio_high": (Sets(("token_high",), ("masked_is",)), Sets(("clip_high",), CLIPPED, MINUS_ONE)),
    "max_importance_ratio": (Sets(("weight_cap",)), Sets(("ratio_cap",), CAPPED)),
    "sequence_clip_high": (Sets(("ratio_cap",), CAPPED),),
    "ratio_type": (Sets(("level",), ("masked_is",)),),
    **{
        f"{level}_mask_{side}": (Sets((f"{level}_{side}",), ("masked_is",)),)
        for level in ("token", "geo", "sequence")
        for side in ("low", "high")
    },
}

CLONE = (
    "git clone https://github.com/PrimeIntellect-ai/prime-rl, add --source prime-rl, and pip install "
    "transformers pydantic-settings prime-pydantic-config tomli tomli-w loguru msgspec"
)

PRIME_RL = Framework(
    name="prime-rl",
    title="PRIME-RL",
    path="composer_plugins.adapters.prime_rl_plugin:loss_fn",
    summary="a loss_fn for trainer.loss.import_path: any policy loss, sampled-token hints, replay pairs",
    names=NAMES,
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
    marks=("orchestrator",),
    install=CLONE,
    suffixes=(".toml",),
    convention="composer_plugins.adapters.prime_rl_plugin.convention:PRIME_RL",
    claims="composer_plugins.conformance.prime_rl_claims.suite",
    doctor="composer_plugins.adapters.prime_rl_plugin.doctor",
    migration="composer_plugins.adapters.prime_rl_plugin.migration",
)
