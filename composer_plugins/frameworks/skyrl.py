"""SkyRL: the options of its AlgorithmConfig that its policy losses read, and its reductions.

Read in skyrl 0.3.0 and in NovaSky-AI/SkyRL at a956457: `skyrl/train/config/config.py` and
`skyrl/backends/skyrl_train/utils/ppo_utils.py`. None of its losses is compared with ours yet, so the table
names no row for a `policy_loss_type`, and `migrate` does not read its configs.
"""

from composer_plugins.frameworks.clips import DUAL, HIGH, LOW
from composer_plugins.frameworks.contract import Framework, Option, Sets

ALGORITHM = "trainer.algorithm"


def _option(name: str, default: float, *sets: Sets) -> Option:
    return Option(key=f"{ALGORITHM}.{name}", default=default, sets=sets)


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
