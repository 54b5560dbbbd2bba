"""Entropy in a policy loss: per token over the vocabulary, as a bonus, and as a token mask."""

import torch
import torch.nn.functional as F

from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import Logits, Mask, Metric, TokenLoss, Tokens


def entropy(logits: Logits, mask: Mask) -> Tokens:
    """H_t = -sum_v p_v log p_v, in nats, with its gradient; an entry of -inf adds 0."""
    x = torch.where(mask.unsqueeze(-1), at_least_float32(logits), 0.0)
    log_p = x.log_softmax(-1)
    # 0 log 0 is 0, but as 0 * -inf it would be NaN, and so would its gradient.
    return keep(-(log_p.exp() * torch.where(log_p == -torch.inf, 0.0, log_p)).sum(-1), mask)


def entropy_bonus(entropies: Tokens, mask: Mask, *, weight: float) -> TokenLoss:
    """-weight H_t, to be added to a policy loss: it rewards a higher entropy.

    Upstreams reduce it differently: verl by the policy's own mode, TRL always as a token mean.
    Source: arXiv 1602.01783 section 4; TRL 1.16 grpo_trainer.py _compute_loss (entropy_coef); verl 0.9.1
    actor.entropy_coeff.
    """
    h = keep(at_least_float32(entropies), mask)
    return TokenLoss(-weight * h, {"entropy": Metric(h.detach(), mask)})


def high_entropy_mask(entropies: Tokens, mask: Mask, *, fraction: float = 0.2) -> Mask:
    """The unmasked tokens whose entropy is at or above the batch's (1 - fraction) quantile.

    The quantile is interpolated as in `torch.quantile`. It is that of the tensors passed: gather the
    entropies of all ranks first. NaN at an unmasked token leaves no token.
    Source: arXiv 2506.01939; TRL 1.16 grpo_trainer.py get_high_entropy_mask (top_entropy_quantile).
    """
    h = at_least_float32(entropies).detach()
    # With one entry more, because a batch without tokens has no minimum.
    ranked = F.pad(torch.where(mask, h, torch.inf).flatten().sort().values, (0, 1), value=torch.inf)
    position = (1 - fraction) * (mask.sum() - 1).clamp(min=0).to(h.dtype)
    below, above = ranked[position.floor().long()], ranked[position.ceil().long()]
    threshold = torch.lerp(below, above, position - position.floor())
    has_nan = keep(h, mask).isnan().any()
    return mask & (h >= torch.where(has_nan, torch.nan, threshold))
