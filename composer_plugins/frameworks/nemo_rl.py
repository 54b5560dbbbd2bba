"""NeMo-RL: the options of its ClippedPGLossConfig, its advantages, and the rest of a YAML for `run_grpo.py`.

Read in NVIDIA-NeMo/RL at 7ea279a: `nemo_rl/algorithms/loss/loss_functions.py`, `algorithms/utils.py`,
`algorithms/advantage_estimator.py`, `algorithms/grpo.py`. `composer-plugins conform nemo-rl --source DIR`
compares its losses, KL estimators, corrections and advantages with ours, by this table.
"""

from typing import Any

from composer_plugins.frameworks.clips import DUAL, HIGH, LOW
from composer_plugins.frameworks.contract import SAMPLING, Conversion, Framework, NamedLoss, Option, Sets
from composer_plugins.losses.row import Kind

LOSS, GRPO, ESTIMATOR = "loss_fn", "grpo", "grpo.adv_estimator"
POLICIES = ("use_cispo", "disable_ppo_ratio", "sequence_level_importance_ratios")
TIS = "truncated_importance_sampling_type"
MAX_RATIO, MIN_RATIO = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
CORRECTING, BY_SEQUENCE = "use_importance_sampling_correction", POLICIES[2]


def _policy(row: str, needs_mode: str = "", **chosen: bool) -> NamedLoss:
    options = {f"{LOSS}.{name}": chosen.get(name, False) for name in POLICIES}
    return NamedLoss(row, options, needs_mode=needs_mode)


def _correction(row: str, kind: str | None, level: str = "token") -> NamedLoss:
    options = {CORRECTING: True, TIS: kind, BY_SEQUENCE: level == "sequence"}
    params = {"level": level} if level == "sequence" else {}
    return NamedLoss(
        row, {f"{LOSS}.{key}": x for key, x in options.items()}, params=params, kind="correction"
    )


def _advantage(row: str, normalize_rewards: bool, leave_one_out: bool) -> NamedLoss:
    names = ("name", "normalize_rewards", "use_leave_one_out_baseline")
    values = ("grpo", normalize_rewards, leave_one_out)
    options = {f"{ESTIMATOR}.{name}": x for name, x in zip(names, values, strict=True)}
    return NamedLoss(row, options, kind="advantage")


LOSSES = (
    _policy("grpo@nemo-rl"),
    _policy("cispo@nemo-rl", "token-mean", use_cispo=True),
    _policy("gspo@nemo-rl", "seq-mean-token-mean", sequence_level_importance_ratios=True),
    _policy("reinforce@nemo-rl", disable_ppo_ratio=True),
    *(
        NamedLoss(f"{k}_corrected@nemo-rl", {f"{LOSS}.reference_policy_kl_type": k}, kind="kl")
        for k in ("k3", "k1", "k2")
    ),
    _correction("tis@nemo-rl", None),
    _correction("tis@nemo-rl", "tis"),
    _correction("icepop@nemo-rl", "icepop"),
    _correction("seq_mask_tis@nemo-rl", "seq-mask-tis"),
    _correction("tis@nemo-rl", None, "sequence"),
    _correction("tis@nemo-rl", "tis", "sequence"),
    _correction("mis", "icepop", "sequence"),
    _advantage("grpo_leave_one_out@nemo-rl", True, True),
    _advantage("grpo@nemo-rl", True, False),
    _advantage("rloo@nemo-rl", False, True),
    _advantage("dr_grpo@nemo-rl", False, False),
)


def _option(name: str, default: Any, *sets: Sets, kind: Kind = "policy", **fields: Any) -> Option:
    return Option(key=f"{LOSS}.{name}", default=default, sets=sets, kind=kind, **fields)


_OWN = ("NeMo-RL decides it with options of its own", "remove it, and set those")
UNAVAILABLE = {
    **dict.fromkeys(("advantage", "advantage_params", "on_bad_reward", "old_policy"), _OWN),
    "hint_weight": (
        "grpo_train gives a loss no log-probabilities of a teacher",
        "set it to 0; distillation_train with ComposerDistillationLoss has a teacher",
    ),
    "replay_weight": (
        "grpo_train has no pairs",
        "set it to 0, or train in TRL, verl or with Tinker's call",
    ),
}

MODES = {True: "token-mean", False: "seq-mean-token-mean"}
OPTIONS = (
    _option("ratio_clip_min", 0.2, *LOW, Sets(("clip_low",), ("cispo",))),
    _option("ratio_clip_max", 0.2, *HIGH, Sets(("clip_high",), ("cispo",))),
    _option("ratio_clip_c", None, *DUAL),
    _option("token_level_loss", True, objective="mode", conversion=Conversion(values=MODES)),
    _option(
        "force_on_policy_ratio",
        False,
        objective="old",
        conversion=Conversion(values={False: "trainer", True: "policy itself"}),
    ),
    _option("reference_policy_kl_penalty", 0.01, objective="kl.weight"),
    _option(
        "use_kl_in_reward",
        False,
        objective="kl.place",
        conversion=Conversion(values={False: "loss", True: "reward"}),
    ),
    _option(
        "use_on_policy_kl_approximation",
        False,
        objective="kl.old",
        conversion=Conversion(values={False: "policy itself", True: "rollout engine"}),
    ),
    _option("kl_input_clamp_value", 20.0, Sets(("log_ratio_clamp",)), kind="kl"),
    _option("kl_output_clamp_value", 10.0, Sets(("value_clamp",)), kind="kl"),
    _option(CORRECTING, False, kind="correction", effect="switches the correction on"),
    _option(TIS, None, kind="correction", effect="chooses the correction"),
    _option(MAX_RATIO, None, Sets(("cap",)), Sets(("high",)), kind="correction"),
    _option(MIN_RATIO, None, Sets(("floor",)), Sets(("low",)), kind="correction"),
    *(
        Option(key=f"{ESTIMATOR}.{name}", default=x, kind="advantage", effect="chooses the advantage")
        for name, x in (("name", "grpo"), ("normalize_rewards", True), ("use_leave_one_out_baseline", True))
    ),
    Option(key=f"{GRPO}.num_generations_per_prompt", default=16, objective="group_size"),
    Option(key="policy.generation.temperature", default=1.0, objective="temperature"),
)

# What bears on the loss and has no field in an Objective, with the values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    f"{LOSS}.positive_example_nll_weight": (None, 0, 0.0),
    f"{GRPO}.advantage_clip_low": (None,),
    f"{GRPO}.advantage_clip_high": (None,),
    f"{GRPO}.overlong_filtering": (None, False),
    f"{GRPO}.use_dynamic_sampling": (None, False),
    f"{GRPO}.zero_variance_prompt_filtering": (None, False),
    f"{GRPO}.reward_shaping.enabled": (None, False),
    f"{GRPO}.reward_scaling.enabled": (None, False),
    f"{GRPO}.seq_logprob_error_threshold": (None,),
    f"{GRPO}.invalid_tool_call_advantage": (None,),
    f"{GRPO}.malformed_thinking_advantage": (None,),
    "policy.draft.enabled": (None, False),
    "policy.router_replay.enabled": (None, False),
    "on_policy_distillation.enabled": (None, False),
    **{
        f"reward_penalties.penalize_{what}": (None, False)
        for what in ("duplicated_reasoning", "empty_final_answer", "unwanted_tokens", "malformed_think_tag")
    },
    **{f"policy.generation.{name}": values for name, values in SAMPLING.items()},
}
NEMO_RL = Framework(
    name="nemo-rl",
    title="NeMo-RL",
    summary="a LossFunction for grpo_train and for distillation_train",
    path="composer_plugins.adapters.nemo_rl_loss.loss:ComposerLoss",
    release="7ea279a",
    losses=LOSSES,
    denominators={"true": "token-mean", "false": "seq-mean-token-mean"},  # of token_level_loss
    options=OPTIONS,
    provides={
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "mask"}
        ),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
        "divergence": frozenset({"student_logits", "teacher_logits", "mask"}),  # over the teacher's top k
    },
    partial_batch={"policy": "NeMo-RL cuts the batch into micro-batches"},
    not_carried=NOT_CARRIED,
    unavailable=UNAVAILABLE,
    marks=(LOSS,),
    trains_otherwise={
        "distillation": "it distils, and has no policy loss",
        "dpo": "it trains on pairs, by DPO",
        "sft": "it is supervised training",
        "rm": "it trains a reward model",
        "ppo": "it is NeMo-RL's PPO, which has options of its own below ppo",
        "teachers": "it distils between tokenizers, and has no policy loss",
    },
    inherits="defaults",
    command_line="hydra",
    config_flag="--config",
    install="git clone https://github.com/NVIDIA-NeMo/RL and add --source RL; no pip install is needed",
    convention="composer_plugins.testing.conventions.global_counts:NEMO_RL",
    claims="composer_plugins.conformance.nemo_rl_claims.suite",
)
