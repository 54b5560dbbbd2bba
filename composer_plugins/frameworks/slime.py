"""slime: the arguments of its policy loss, which a launch script gives to train.py, and its advantages.

Read in THUDM/slime at 624b824: `slime/utils/arguments.py`, `slime/utils/ppo_utils.py`,
`slime/backends/megatron_utils/loss.py`, `slime/ray/rollout.py`. Miles (radixark/miles at 31f1ca9) is a fork
with the same arguments; it has no cispo. `composer-plugins conform slime --source DIR` compares slime's
losses, KL estimators and corrections with ours, by this table.
"""

from typing import Any

from composer_plugins.frameworks.clips import CLIPPED, DUAL
from composer_plugins.frameworks.contract import SAMPLING, Conversion, Framework, NamedLoss, Option, Sets
from composer_plugins.losses.row import Kind

ESTIMATOR, OPSM = "advantage_estimator", "use_opsm"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
ICEPOP_OF_MILES = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
STD, REWARDS = "disable_grpo_std_normalization", "disable_rewards_normalization"
BOUNDED = (*CLIPPED, "cispo")


def _policy(row: str, estimator: str, masked: bool = False) -> NamedLoss:
    return NamedLoss(row, {ESTIMATOR: estimator, OPSM: masked})


def _kl(row: str, kind: str, unbiased: bool = False, **params: float) -> NamedLoss:
    options = {"kl_loss_type": kind, "use_unbiased_kl": unbiased}
    return NamedLoss(row, options, params=params, kind="kl")


def _advantage(row: str, estimator: str, std_is_off: bool) -> NamedLoss:
    return NamedLoss(row, {ESTIMATOR: estimator, STD: std_is_off, REWARDS: False}, kind="advantage")


CLIPPING = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")  # the clip of PPO
LOSSES = (
    *(_policy("grpo@slime", estimator) for estimator in CLIPPING),
    _policy("gspo@slime", "gspo"),
    _policy("cispo@slime", "cispo"),
    *(_policy("opsm@slime", estimator, True) for estimator in CLIPPING),
    _kl("k1", "k1"),
    _kl("k2", "k2"),
    _kl("k3", "k3"),
    _kl("k3@slime", "low_var_kl"),
    _kl("k1_corrected@slime", "k1", True),
    _kl("k2_corrected@slime", "k2", True),
    NamedLoss("k3_corrected", {"kl_loss_type": "k3", "use_unbiased_kl": True}, kind="kl"),
    _kl("k3_corrected@slime", "low_var_kl", True),
    NamedLoss("tis@slime", {"use_tis": True, "custom_tis_function_path": None}, kind="correction"),
    NamedLoss("icepop@slime", {"use_tis": True, "custom_tis_function_path": ICEPOP}, kind="correction"),
    NamedLoss(
        "icepop@slime", {"use_tis": True, "custom_tis_function_path": ICEPOP_OF_MILES}, kind="correction"
    ),
    *(_advantage("grpo@slime", one, False) for one in ("grpo", "gspo", "cispo")),
    *(_advantage("dr_grpo", one, True) for one in ("grpo", "gspo", "cispo")),
)


def _option(key: str, default: Any, *sets: Sets, kind: Kind = "policy", **fields: Any) -> Option:
    return Option(key=key, default=default, sets=sets, kind=kind, **fields)


_OWN = ("slime decides it with options of its own", "remove it, and set those")
UNAVAILABLE = {
    **dict.fromkeys(("advantage", "advantage_params", "on_bad_reward", "old_policy"), _OWN),
    "replay_weight": ("slime has no pairs", "set it to 0, or train in TRL, verl or with Tinker's call"),
}

MODES = {False: "seq-mean-token-mean", True: "token-mean"}
OPTIONS = (
    _option("eps_clip", 0.2, Sets(("clip_low", "clip_high"), BOUNDED)),
    _option("eps_clip_high", None, Sets(("clip_high",), BOUNDED)),
    _option("eps_clip_c", None, *DUAL),
    _option("opsm_delta", 1e-4, Sets(("threshold",), ("opsm",))),
    _option("calculate_per_token_loss", False, objective="mode", conversion=Conversion(values=MODES)),
    _option(
        "use_rollout_logprobs",
        False,
        objective="old",
        conversion=Conversion(values={False: "trainer", True: "rollout engine"}),
    ),
    # The drift of opsm is the drift from the old policy, whichever policy that is.
    _option(
        OPSM,
        False,
        objective="rollout",
        conversion=Conversion(values={False: "rollout engine", True: "trainer"}),
    ),
    _option("entropy_coef", 0.0, objective="entropy"),
    _option("use_kl_loss", False, effect="adds a KL to the loss"),
    _option("kl_loss_coef", 0.0, objective="kl.weight", only_with=("use_kl_loss", True)),
    _option("kl_loss_type", "k1", kind="kl", effect="chooses the KL"),
    _option("use_unbiased_kl", False, kind="kl", effect="multiplies the KL by the ratio"),
    _option("use_tis", False, kind="correction", effect="switches the correction on"),
    _option("custom_tis_function_path", None, kind="correction", effect="chooses the correction"),
    _option("tis_clip", 2.0, Sets(("cap",)), Sets(("high",)), kind="correction"),
    _option("tis_clip_low", 0.0, Sets(("floor",)), Sets(("low",)), kind="correction"),
    _option(STD, False, kind="advantage", effect="leaves the deviation out"),
    _option(REWARDS, False, kind="advantage", effect="leaves the rewards as they are"),
    _option("n_samples_per_prompt", 1, objective="group_size"),
    _option("rollout_temperature", 1.0, objective="temperature"),
)

# What bears on the loss and has no field in an Objective, with the values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    "loss_type": (None, "policy_loss", "custom_loss", "sft_loss"),  # the adapter's Configs looks at it
    "composer": (None, {}),  # our own options: the adapter reads them
    "kl_coef": (None, 0, 0.0),
    "normalize_advantages": (None, False),
    "use_opd": (None, False),
    "mask_offpolicy_in_partial_rollout": (None, False),
    "dynamic_sampling_filter_path": (None,),
    "custom_advantage_function_path": (None,),
    "custom_pg_loss_reducer_function_path": (None,),
    "custom_reward_post_process_path": (None,),
    "custom_convert_samples_to_train_data_path": (None,),
    "rollout_sample_filter_path": (None,),
    "moe_aux_loss_coeff": (None, 0, 0.0),
    "loss_mask_type": (None,),
    "ref_update_interval": (None,),
    "use_routing_replay": (None, False),
    "use_rollout_routing_replay": (None, False),
    "enable_mtp_training": (None, False),
    **{f"rollout_{name}": values for name, values in SAMPLING.items()},
}
SLIME = Framework(
    name="slime",
    title="slime",
    summary="a function for --custom-loss-function-path, in Miles too",
    path="composer_plugins.adapters.slime_loss:loss_fn",
    release="624b824",
    losses=LOSSES,
    denominators={"false": "seq-mean-token-mean", "true": "token-mean"},  # of calculate_per_token_loss
    options=OPTIONS,
    provides={
        "policy": frozenset(
            {"logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs", "advantages"}
            | {"entropies", "mask"}
        ),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
        "divergence": frozenset({"student_logprobs", "teacher_logprobs", "old_logprobs", "mask"}),
    },
    partial_batch={"policy": "slime cuts the batch into micro-batches"},
    not_carried=NOT_CARRIED,
    unavailable=UNAVAILABLE,
    marks=("eps_clip_c", "calculate_per_token_loss", "n_samples_per_prompt", "rollout_temperature"),
    command_line="flags",
    config_flag="--custom-config-path",
    file_wins=True,
    install="git clone https://github.com/THUDM/slime and add --source slime; no pip install is needed",
    convention="composer_plugins.testing.conventions.global_counts:SLIME",
    claims="composer_plugins.conformance.slime_claims.suite",
    migration="composer_plugins.adapters.slime_loss.migration",
)
