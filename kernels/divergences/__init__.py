"""Distillation divergences between a student S and a teacher T, per token, in nats."""

from composer_plugins.kernels.divergences.full import (
    forward_kl,
    jsd,
    reverse_kl,
    sampled_token,
)

__all__ = ["forward_kl", "jsd", "reverse_kl", "sampled_token"]
