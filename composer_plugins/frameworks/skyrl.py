"""SkyRL: its names of losses, the options of its config that bear on them, and its reductions.

Read in skyrl 0.3.0 and 0.4.0: `skyrl/train/config/config.py`, `skyrl/train/utils/utils.py` (validate_cfg) and
`skyrl/backends/skyrl_train/` (`utils/ppo_utils.py`, `utils/off_policy_correction_utils.py`,
`workers/worker.py`). The two releases differ in what CISPO's bounds are by default, and in its anchor.

SkyRL divides the advantages of a mini-batch by the denominator before a loss sees them, and adds up what the
loss returns. So each term of a loss must be proportional to the advantages.
"""

from typing import Any

from composer_plugins.frameworks.clips import DUAL, HIGH, LOW
from composer_plugins.frameworks.contract import (
    ONE_MINUS,
    SAMPLING,
    Conversion,
    Framework,
    NamedLoss,
    Option,
    Sets,
)

ALGORITHM, GENERATOR = "trainer.algorithm", "generator"
NODE = f"{ALGORITHM}.composer"  # the table of our options, which AlgorithmConfig has by a subclass


CORRECTION = f"{ALGORITHM}.off_policy_correction"


class Key:
    """The keys of SkyRL's config that the adapter reads or names in a message."""

    POLICY, ESTIMATOR = f"{ALGORITHM}.policy_loss_type", f"{ALGORITHM}.advantage_estimator"
    DPPO_TYPE, ANCHOR = f"{ALGORITHM}.dppo.dppo_type", f"{ALGORITHM}.cispo.cispo_anchor"
    REDUCTION, LENGTH = f"{ALGORITHM}.loss_reduction", f"{ALGORITHM}.max_seq_len"
    USE_KL, KL_IN_REWARD = f"{ALGORITHM}.use_kl_loss", f"{ALGORITHM}.use_kl_in_reward"
    KL_COEF, KL_TYPE = f"{ALGORITHM}.kl_loss_coef", f"{ALGORITHM}.kl_estimator_type"
    KL_CONTROL = f"{ALGORITHM}.kl_ctrl.type"
    USE_ENTROPY, ENTROPY = f"{ALGORITHM}.use_entropy_loss", f"{ALGORITHM}.entropy_loss_coef"
    TIS, SEQUENCE_MASK = f"{CORRECTION}.tis_ratio_type", f"{CORRECTION}.sequence_mask_metric"
    TOKEN_CAP = f"{CORRECTION}.token_tis_ratio_clip_high"
    SEQUENCE_CAP = f"{CORRECTION}.sequence_tis_ratio_clip_high"
    GEO_MASK = (f"{CORRECTION}.geo_mask_low", f"{CORRECTION}.geo_mask_high")
    PRODUCT_MASK = (f"{CORRECTION}.product_mask_low", f"{CORRECTION}.product_mask_high")
    TOKEN_MASK = (f"{CORRECTION}.token_mask_is_threshold_low", f"{CORRECTION}.token_mask_is_threshold_high")
    OUTLIERS = (
        f"{CORRECTION}.outlier_token_is_threshold_low",
        f"{CORRECTION}.outlier_token_is_threshold_high",
    )
    USE_TIS, FORMER_CAP = f"{ALGORITHM}.use_tis", f"{ALGORITHM}.tis_imp_ratio_cap"
    GROUP_SIZE, LOGPROBS = f"{GENERATOR}.n_samples_per_prompt", f"{GENERATOR}.sampling_params.logprobs"
    TEMPERATURE, SAMPLED_AT = f"{ALGORITHM}.temperature", f"{GENERATOR}.sampling_params.temperature"
    ENTRYPOINT = "trainer.override_entrypoint"
    STEP_WISE, ASYNC = f"{GENERATOR}.step_wise_trajectories", "trainer.fully_async.enabled"


ENTRYPOINT = "composer_plugins.adapters.skyrl_loss.main"  # our value of SkyRL's option of this name
LEGACY, NORM = "token_mean_legacy", "seq_mean_token_sum_norm"
DENOMINATORS = {  # by loss_reduction; LEGACY has none, because it depends on the micro-batches
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    NORM: "seq-mean-token-sum-norm",
    "prompt_mean": "prompt-mean",
}
LEGACY_REMARK = "the mean of the micro-batches' own token means, so it depends on how the batch is cut"
LOG_CLAMP = 20.0  # of every ratio and weight of SkyRL's, in nats
# What SkyRL's own losses do that are not proportional to the advantages, which it has divided before.
FOLDED = {
    "clip_cov": "it compares the covariance of advantages that are divided by the denominator already with "
    "clip_cov_lb and clip_cov_ub, so it hardly ever drops a token",
    "kl_cov": "its penalty is not divided by the denominator, and its policy gradient is, so the penalty "
    "weighs as much more as the mini-batch has tokens (token_mean)",
}
BY_TOKEN = ("gae", "reinforce_pp", "remax")  # rows whose advantages differ by token
_SAMPLED = "SkyRL gives a loss the log-probabilities of the sampled tokens, and neither a teacher's nor pairs"
_CORRECTED = "SkyRL corrects for the rollout engine itself"
UNAVAILABLE = {
    **dict.fromkeys(("hint_weight", "replay_weight"), (_SAMPLED, "remove it")),
    **dict.fromkeys(
        ("rollout_correction", "rollout_correction_params"),
        (_CORRECTED, "remove it, and set off_policy_correction"),
    ),
    "old_policy": ("SkyRL computes the old log-probabilities itself", "remove it"),
}


def _option(name: str, default: Any, *sets: Sets, **fields: Any) -> Option:
    return Option(key=f"{ALGORITHM}.{name}", default=default, sets=sets, **fields)


PLUS_ONE = Conversion(offset=1.0)
CLIP_LOW = _option("eps_clip_low", 0.2, *LOW, Sets(("token_low",), ("masked_is",), ONE_MINUS))
CLIP_HIGH = _option("eps_clip_high", 0.2, *HIGH, Sets(("token_high",), ("masked_is",), PLUS_ONE))
CLIP_C = _option("clip_ratio_c", 3.0, *DUAL)
CLIPS = (CLIP_LOW, CLIP_HIGH)


def _cispo(low: float, high: float) -> tuple[Option, ...]:
    return (
        _option("cispo.cispo_eps_clip_low", low, Sets(("clip_low",), ("cispo",))),
        _option("cispo.cispo_eps_clip_high", high, Sets(("clip_high",), ("cispo",))),
    )


ANCHOR = Option(  # not before 0.4
    key=Key.ANCHOR,
    default="old",
    objective="old",
    conversion=Conversion(values={"old": "trainer", "rollout": "rollout engine"}),
    only_with=(Key.POLICY, "cispo"),
)
TAUS = tuple(_option(f"sapo.{x}", y, Sets((x,), ("sapo",))) for x, y in (("tau_pos", 1.0), ("tau_neg", 1.05)))
CLIP_COV = tuple(
    _option(f"clip_cov.{key}", default, Sets((name,), ("clip_cov",)))
    for key, default, name in (
        ("clip_ratio", 0.0002, "cov_ratio"),
        ("clip_cov_lb", 1.0, "cov_low"),
        ("clip_cov_ub", 5.0, "cov_high"),
    )
)
KL_COV = tuple(
    _option(f"kl_cov.{key}", default, Sets((name,), ("kl_cov",)))
    for key, default, name in (("kl_cov_frac", 0.2, "cov_ratio"), ("ppo_kl_coef", 1.0, "kl_coef"))
)
DELTAS = tuple(
    _option(f"dppo.delta_{end}", 0.2, *(Sets((f"{x}_{end}",), (f"dppo_{x}",)) for x in ("tv", "kl")))
    for end in ("low", "high")
)


def _policy(name: str, row: str, *own: Option, dppo_type: str = "", **fields: Any) -> NamedLoss:
    """SkyRL's loss `name`, and the options that it reads."""
    options = {Key.POLICY: name} | ({Key.DPPO_TYPE: dppo_type} if dppo_type else {})
    return NamedLoss(row, options, own, **fields)


LOSSES = (
    _policy("regular", "grpo@skyrl", *CLIPS),
    _policy("dual_clip", "grpo@skyrl", *CLIPS, CLIP_C, params={"dual_clip": 3.0}),
    _policy("gspo", "gspo_token@skyrl", *CLIPS),
    _policy("cispo", "cispo@skyrl<0.4", *_cispo(0.0, 5.0), until="0.4"),
    _policy("cispo", "cispo@skyrl", *_cispo(1.0, 4.0), ANCHOR, since="0.4"),
    _policy("rollout_is", "masked_is@skyrl", *CLIPS),
    _policy("clip_cov", "clip_cov@skyrl", *CLIPS, *CLIP_COV),
    _policy("kl_cov", "kl_cov@skyrl", *KL_COV),
    _policy("sapo", "sapo@skyrl", *TAUS),
    _policy("importance_sampling", "importance_sampling@skyrl"),
    _policy("dppo", "dppo_tv@skyrl", *DELTAS, dppo_type="binary_tv"),
    _policy("dppo", "dppo_kl@skyrl", *DELTAS, dppo_type="binary_kl"),
)
LIKELIHOOD = "cross_entropy"  # its loss without advantages, for supervised fine-tuning: no row
BY_STD = _option(
    "grpo_norm_by_std",
    True,
    Sets(("scale",), ("grpo",), Conversion(values={False: "none"})),
    kind="advantage",
)
GAMMA = _option("gamma", 1.0, Sets(("gamma",)), kind="advantage")
LAMBDA = _option("lambd", 1.0, Sets(("lam",)), kind="advantage")
ESTIMATORS = tuple(
    NamedLoss(f"{row}@skyrl", {Key.ESTIMATOR: name}, own, kind="advantage")
    for name, row, own in (
        ("grpo", "grpo", (BY_STD,)),
        ("rloo", "rloo", ()),
        ("gae", "gae", (GAMMA, LAMBDA)),
        ("reinforce++", "reinforce_pp", (GAMMA,)),
        ("maxrl", "maxrl", ()),
    )
)
KL_ESTIMATORS = {name: f"{name}@skyrl" for name in ("k1", "k2", "k3", "abs")}

OWN_TERM = "as in SkyRL, which adds this term to the policy loss"
CHOICE = "it chooses the loss or the estimator"
WEIGHTS = "as in SkyRL, which multiplies the loss of each token by the weights, or masks it out"
# Options that do the same with our losses as with SkyRL's own.
ACTING = (
    Option(key=Key.POLICY, default="regular", effect=CHOICE),
    Option(key=Key.DPPO_TYPE, default="binary_tv", effect=CHOICE, only_with=(Key.POLICY, "dppo")),
    ANCHOR,
    Option(key=Key.ESTIMATOR, kind="advantage", default="grpo", effect=CHOICE),
    Option(
        key=Key.REDUCTION,
        default="token_mean",
        objective="mode",
        conversion=Conversion(values={**DENOMINATORS, LEGACY: "token-mean"}),
    ),
    Option(key=Key.LENGTH, objective="length", only_with=(Key.REDUCTION, NORM)),
    *(
        Option(key=key, default=default, effect=OWN_TERM)
        for key, default in ((Key.USE_KL, True), (Key.KL_IN_REWARD, False), (Key.USE_ENTROPY, False))
    ),
    Option(key=Key.KL_COEF, default=0.001, objective="kl.weight"),
    Option(
        key=Key.KL_TYPE,
        default="k3",
        objective="kl.estimator",
        conversion=Conversion(values=KL_ESTIMATORS),
    ),
    Option(key=Key.ENTROPY, default=0.01, objective="entropy", only_with=(Key.USE_ENTROPY, True)),
    Option(key=Key.SAMPLED_AT, default=1.0, objective="temperature"),
    Option(key=Key.TEMPERATURE, objective="temperature", fallback=Key.SAMPLED_AT),
    Option(key=Key.GROUP_SIZE, default=5, objective="group_size"),
    Option(key=Key.LOGPROBS, default=1, effect="without it the loss has no rollout log-probabilities"),
    Option(key=Key.TIS, effect=WEIGHTS),
    Option(key=Key.TOKEN_CAP, default=2.0, effect=WEIGHTS, only_with=(Key.TIS, "token")),
    Option(key=Key.SEQUENCE_CAP, default=5.0, effect=WEIGHTS, only_with=(Key.TIS, "sequence")),
    Option(key=Key.SEQUENCE_MASK, effect=WEIGHTS),
    *(
        Option(key=key, default=default, effect=WEIGHTS, only_with=(Key.SEQUENCE_MASK, metric))
        for keys, defaults, metric in (
            (Key.GEO_MASK, (0.99, 1.01), "geometric"),
            (Key.PRODUCT_MASK, (0.5, 2.0), "product"),
        )
        for key, default in zip(keys, defaults, strict=True)
    ),
    *(
        Option(key=key, effect=WEIGHTS, only_with=(other, None))  # SkyRL needs both, or masks nothing
        for key, other in (Key.TOKEN_MASK, Key.TOKEN_MASK[::-1])
    ),
    *(Option(key=key, effect=WEIGHTS) for key in Key.OUTLIERS),
    Option(key=Key.USE_TIS, default=False, effect=WEIGHTS),
    Option(key=Key.FORMER_CAP, default=-1.0, effect=WEIGHTS, only_with=(Key.USE_TIS, True)),
)
OPTIONS = (
    *(*CLIPS, CLIP_C, *_cispo(1.0, 4.0), *TAUS, *CLIP_COV, *KL_COV, *DELTAS),
    *(BY_STD, GAMMA, LAMBDA),
    *ACTING,
)
# The rest of its AlgorithmConfig, with the defaults, which the losses do not read; and the temperature, which
# SkyRL takes from the sampler where it is null.
CONFIG: dict[str, Any] = {
    **{
        "temperature": 1.0,
        "value_clip": 0.2,
        "advantage_batch_normalize": False,
        "value_head_prefix": "value_head",
    },
    **{
        "zero_variance_filter": False,
        "zero_variance_filter_tol": 1e-6,
        "enable_sample_support_replay": False,
    },
    "kl_ctrl": {"type": "fixed", "kl_target": 0.1, "horizon": 10000},
    "dynamic_sampling": {"type": None, "max_sample_batches": 30, "min_replace_ratio": 0.3},
}
# What bears on the loss and has no field in Objective, with the values that change nothing.
NOT_CARRIED: dict[str, tuple[Any, ...]] = {
    f"{ALGORITHM}.advantage_batch_normalize": (None, False),
    f"{ALGORITHM}.zero_variance_filter": (None, False),
    f"{ALGORITHM}.dynamic_sampling.type": (None,),
    f"{ALGORITHM}.enable_sample_support_replay": (None, False),
    f"{ALGORITHM}.overlong_buffer_len": (None,),  # of its DAPO example, which changes the rewards by it
    f"{GENERATOR}.apply_overlong_filtering": (None, False),
    f"{GENERATOR}.zero_reward_on_non_stop": (None, False),
    f"{GENERATOR}.merge_stepwise_output": (None, False),
    Key.STEP_WISE: (None, False),
    Key.ASYNC: (None, False),
    Key.ENTRYPOINT: (None, "", ENTRYPOINT),
    "trainer.update_ref_every_epoch": (None, False),
    "trainer.policy.megatron_config.moe_aux_loss_coeff": (None, 0, 0.0),
    **{f"{GENERATOR}.sampling_params.{name}": values for name, values in SAMPLING.items()},
    f"{GENERATOR}.sampling_params.additional_kwargs": (None, {}),
}
SKYRL = Framework(
    name="skyrl",
    title="SkyRL",
    path="composer_plugins.adapters.skyrl_loss.register:register",
    summary="SkyRL's registries: policy losses and advantage estimators, named composer/NAME",
    releases=("0.3", "0.4"),
    release="0.4",
    losses=(
        *LOSSES,
        *ESTIMATORS,
        *(NamedLoss(row, {Key.KL_TYPE: name}, kind="kl") for name, row in KL_ESTIMATORS.items()),
    ),
    options=OPTIONS,
    denominators=DENOMINATORS,
    unavailable=UNAVAILABLE,
    provides={
        "policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"}),
        "advantage": frozenset({"rewards", "group_ids", "lengths", "token_rewards", "values", "mask"}),
    },
    partial_batch={"policy": "SkyRL cuts the batch into micro-batches"},
    divides_advantages="SkyRL divides only the advantages by the number of tokens, so that term would weigh "
    "as much more",
    not_carried=NOT_CARRIED,
    marks=("generator",),
    package="skyrl",
    install="pip install 'composer-plugins' 'skyrl>=0.3,<0.5'",
    command_line="hydra",
    convention="composer_plugins.testing.conventions.sums:SKYRL",
    registry="composer_plugins.conformance.skyrl_claims.upstream:policy_losses",
    claims="composer_plugins.conformance.skyrl_claims.suite",
    migration="composer_plugins.adapters.skyrl_loss.migration",
)
