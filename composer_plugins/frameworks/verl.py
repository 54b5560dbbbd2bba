"""verl: the names of its options, and what a registered loss or estimator is called with."""

from composer_plugins.frameworks.contract import Framework, Sets

WEIGHT_CAPPED = (
    "dppo_tv",
    "dppo_kl",
    "dppo_topk_tv",
    "dppo_topk_kl",
    "ipo",
    "ipo_centered",
    "minirl",
    "masked_is",
)
LOW = tuple(Sets((name,)) for name in ("clip_low", "tv_low", "kl_low"))
HIGH = tuple(Sets((name,)) for name in ("clip_high", "tv_high", "kl_high"))
BOTH = tuple(Sets(low.parameters + high.parameters) for low, high in zip(LOW, HIGH, strict=True))

NAMES = {
    **dict.fromkeys(("clip_ratio", "cliprange"), BOTH),  # the second ones are of its functions
    **dict.fromkeys(("clip_ratio_low", "cliprange_low"), LOW),
    **dict.fromkeys(("clip_ratio_high", "cliprange_high"), HIGH),
    "clip_ratio_c": (Sets(("dual_clip",)), Sets(("ratio_cap",), WEIGHT_CAPPED)),
    "dro_beta": (Sets(("beta",), ("dro",)),),
    "clip_cov_ratio": (Sets(("cov_ratio",), ("clip_cov",)),),
    "clip_cov_lb": (Sets(("cov_low",), ("clip_cov",)),),
    "clip_cov_ub": (Sets(("cov_high",), ("clip_cov",)),),
    "kl_cov_ratio": (Sets(("cov_ratio",), ("kl_cov",)),),
    "ppo_kl_coef": (Sets(("kl_coef",), ("kl_cov",)),),
}

VERL = Framework(
    name="verl",
    title="verl",
    path="composer_plugins.adapters.verl_plugin.register:register",
    summary="verl's registries: estimators and policy losses; its trainer composer_sync: hint and replay",
    names=NAMES,
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
    marks=("actor_rollout_ref",),
    package="verl",
    install="pip install 'composer-plugins[verl]'",
    has_overrides=True,
    convention="composer_plugins.adapters.verl_plugin.convention:VERL",
    claims="composer_plugins.conformance.verl_claims.suite",
    doctor="composer_plugins.adapters.verl_plugin.doctor",
    migration="composer_plugins.adapters.verl_plugin.migration",
)
