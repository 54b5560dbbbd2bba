"""Advantages: how much better a rollout did than the others of its prompt."""

from composer_plugins.kernels.advantages.grouped import (
    dr_grpo,
    grpo,
    rloo,
)

__all__ = ["dr_grpo", "grpo", "rloo"]
