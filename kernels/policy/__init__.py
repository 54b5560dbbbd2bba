"""Policy losses, one short function per published loss, per token."""

from composer_plugins.kernels.policy.clipped import (
    cispo,
    dapo,
    dppo_kl,
    dppo_tv,
    dr_grpo,
    grpo,
    gspo,
    gspo_token,
)

__all__ = ["cispo", "dapo", "dppo_kl", "dppo_tv", "dr_grpo", "grpo", "gspo", "gspo_token"]
