"""The summands of divergences: one number for each vocabulary entry of a support, in nats.

0 log 0 = 0: an entry whose weight is 0, whether forbidden or underflown, adds exactly 0 and has no gradient,
whatever its probability on the other side is. An entry with a weight that the other side forbids adds
infinity.
"""

import math

import torch
from jaxtyping import Bool
from torch import Tensor

from composer_plugins.kernels.types import LogProbs, Tokens

LIMIT = 1e-6  # an exponent nearer than this to 0 takes the limit: the quotient would be 0 / 0


def kl(log_p: LogProbs, log_q: LogProbs) -> LogProbs:
    """P (log P - log Q)."""
    zero = _is_zero(log_p)
    p, q = log_p.masked_fill(zero, 0.0), log_q.masked_fill(zero, 0.0)
    return (p.exp() * (p - q)).masked_fill(zero, 0.0)


def generalized_kl(log_p: LogProbs, log_q: LogProbs) -> LogProbs:
    """P (log P - log Q) - P + Q: at least 0, also where P and Q do not sum to 1."""
    return kl(log_p, log_q) - log_p.exp() + log_q.exp()


def cross_entropy(log_p: LogProbs, log_q: LogProbs) -> LogProbs:
    """-P log Q: the KL and the entropy of P."""
    zero = _is_zero(log_p)
    p, q = log_p.masked_fill(zero, 0.0), log_q.masked_fill(zero, 0.0)
    return (-p.exp() * q).masked_fill(zero, 0.0)


def mixture(log_p: LogProbs, log_q: LogProbs, weight: float) -> LogProbs:
    """log(weight P + (1 - weight) Q), for 0 < weight < 1; -inf, without gradient, where both are 0."""
    zero = _is_zero(log_p) & _is_zero(log_q)
    p, q = log_p.masked_fill(zero, 0.0), log_q.masked_fill(zero, 0.0)
    return torch.logaddexp(p + math.log(weight), q + math.log1p(-weight)).masked_fill(zero, -math.inf)


def jsd(log_s: LogProbs, log_t: LogProbs, beta: float) -> LogProbs:
    """beta T (log T - log M) + (1 - beta) S (log S - log M), M = beta T + (1 - beta) S; at 0 and 1 a KL."""
    if beta == 0:
        return kl(log_t, log_s)
    if beta == 1:
        return kl(log_s, log_t)
    log_m = mixture(log_t, log_s, beta)
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)


def alpha_beta(log_s: LogProbs, log_t: LogProbs, alpha: float, beta: float) -> LogProbs:
    """-(T^alpha S^beta - alpha / c T^c - beta / c S^c) / (alpha beta), c = alpha + beta; its limits at 0."""
    if alpha < LIMIT:
        return generalized_kl(beta * log_s, beta * log_t) / beta**2
    if beta < LIMIT:
        return generalized_kl(alpha * log_t, alpha * log_s) / alpha**2
    c = alpha + beta
    product = (alpha * log_t + beta * log_s).exp()
    powers = (alpha * (c * log_t).exp() + beta * (c * log_s).exp()) / c
    return (powers - product) / (alpha * beta)


def total(entries: LogProbs, entry_clip: float | None = None) -> Tokens:
    """The sum over the support, of entries clipped from above: what is below 0 stays as it is."""
    return (entries if entry_clip is None else entries.clamp(max=entry_clip)).sum(-1)


def _is_zero(log_p: LogProbs) -> Bool[Tensor, "*batch tokens k"]:
    return log_p.detach().exp() == 0
