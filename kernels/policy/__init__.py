"""Policy losses, one short function per published loss, per token."""

from composer_plugins.kernels.policy.clipped import dapo, dr_grpo, grpo, kimi, ppo, sapo
from composer_plugins.kernels.policy.covariance import clip_cov, kl_cov
from composer_plugins.kernels.policy.distilled import iw_opd, opd, ref_kl
from composer_plugins.kernels.policy.masked import masked_is, opsm
from composer_plugins.kernels.policy.regions import dppo_kl, dppo_topk_kl, dppo_topk_tv, dppo_tv, ipo, minirl
from composer_plugins.kernels.policy.scored import (
    cispo,
    dro,
    gpg,
    importance_sampling,
    reinforce,
    rloo,
    vespo,
)
from composer_plugins.kernels.policy.sequence import gmpo, gspo, gspo_token, luspo

__all__ = [
    "cispo",
    "clip_cov",
    "dapo",
    "dppo_kl",
    "dppo_topk_kl",
    "dppo_topk_tv",
    "dppo_tv",
    "dr_grpo",
    "dro",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "gspo_token",
    "importance_sampling",
    "ipo",
    "iw_opd",
    "kimi",
    "kl_cov",
    "luspo",
    "masked_is",
    "minirl",
    "opd",
    "opsm",
    "ppo",
    "ref_kl",
    "reinforce",
    "rloo",
    "sapo",
    "vespo",
]
