"""SkyRL: the options of its AlgorithmConfig that its policy losses read, and its reductions.

Read in skyrl 0.3.0 and in NovaSky-AI/SkyRL at a956457: `skyrl/train/config/config.py` and
`skyrl/backends/skyrl_train/utils/ppo_utils.py`. None of its losses is compared with ours yet, so the table
names no row for a `policy_loss_type`, and `migrate` does not read its configs.
"""

from typing import Any

from composer_plugins.frameworks.clips import DUAL, HIGH, LOW
from composer_plugins.frameworks.contract import Framework, Option, Sets

ALGORITHM = "trainer.algorithm"


def _option(name: str, default: float, *sets: Sets) -> Option:
    return Option(key=f"{ALGORITHM}.{name}", default=default, sets=sets)


# The rest of its AlgorithmConfig that its losses read, with the defaults (temperature: the sampler's).
CONFIG: dict[str, Any] = {
    **{"policy_loss_type": "regular", "temperature": 1.0, "max_seq_len": None, "value_clip": 0.2},
    **{"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_estimator_type": "k3", "use_kl_in_reward": False},
    **{"use_entropy_loss": False, "entropy_loss_coef": 0.01, "advantage_batch_normalize": False},
    **{"advantage_estimator": "grpo", "grpo_norm_by_std": True, "lambd": 1.0, "gamma": 1.0},
    **{"zero_variance_filter": False, "zero_variance_filter_tol": 1e-6, "value_head_prefix": "value_head"},
    **{"tis_imp_ratio_cap": -1.0, "use_tis": False},
    "kl_ctrl": {"type": "fixed", "kl_target": 0.1, "horizon": 10000},
    "dynamic_sampling": {"type": None, "max_sample_batches": 30, "min_replace_ratio": 0.3},
    "cispo": {"cispo_anchor": "old"},
    "dppo": {"dppo_type": "binary_tv"},
    "off_policy_correction": {
        **{"tis_ratio_type": None, "token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0},
        **{"sequence_mask_metric": None, "geo_mask_high": 1.01, "geo_mask_low": 0.99},
        **{"product_mask_high": 2.0, "product_mask_low": 0.5},
        **dict.fromkeys(("outlier_token_is_threshold_low", "outlier_token_is_threshold_high")),
        **dict.fromkeys(("token_mask_is_threshold_low", "token_mask_is_threshold_high")),
    },
}

SKYRL = Framework(
    name="skyrl",
    title="SkyRL",
    release="0.3.0",
    options=(
        _option("eps_clip_low", 0.2, *LOW),
        _option("eps_clip_high", 0.2, *HIGH),
        _option("clip_ratio_c", 3.0, *DUAL),  # of dual_clip alone
        _option("cispo.cispo_eps_clip_low", 1.0, Sets(("clip_low",), ("cispo",))),
        _option("cispo.cispo_eps_clip_high", 4.0, Sets(("clip_high",), ("cispo",))),
        _option("sapo.tau_pos", 1.0, Sets(("tau_pos",), ("sapo",))),
        _option("sapo.tau_neg", 1.05, Sets(("tau_neg",), ("sapo",))),
        _option("clip_cov.clip_ratio", 0.0002, Sets(("cov_ratio",), ("clip_cov",))),
        _option("clip_cov.clip_cov_lb", 1.0, Sets(("cov_low",), ("clip_cov",))),
        _option("clip_cov.clip_cov_ub", 5.0, Sets(("cov_high",), ("clip_cov",))),
        _option("kl_cov.kl_cov_frac", 0.2, Sets(("cov_ratio",), ("kl_cov",))),
        _option("kl_cov.ppo_kl_coef", 1.0, Sets(("kl_coef",), ("kl_cov",))),
        _option("dppo.delta_low", 0.2, Sets(("tv_low",), ("dppo_tv",)), Sets(("kl_low",), ("dppo_kl",))),
        _option("dppo.delta_high", 0.2, Sets(("tv_high",), ("dppo_tv",)), Sets(("kl_high",), ("dppo_kl",))),
    ),
    # By loss_reduction; SkyRL also has "token_mean_legacy", its earlier mean.
    denominators={
        "token_mean": "token-mean",
        "sequence_mean": "seq-mean-token-mean",
        "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
        "prompt_mean": "prompt-mean",
    },
    marks=("generator",),
    convention="composer_plugins.testing.conventions.sums:SKYRL",
)
