"""Log-probabilities and entropies of tokens from hidden states, by a streamed softmax.

For each token, with o = log sum_{v != y} exp z_v, the sum over all entries but the token's own:

    log p_y = -log(1 + exp(o - z_y)),     1 - p_y = sigmoid(o - z_y)
    H       = H_2(p_y) + (1 - p_y) H_o    H_2: of a coin, H_o: of the distribution of the other entries

So a token of probability almost 1 keeps an accurate 1 - p_y, which is the size of its gradient:

    d log p_y / dz_y = 1 - p_y,   d log p_y / dz_v = -p_v,   dH / dz_v = -p_v (log p_v + H)

The backward computes the logits again, but only of the tokens that have a gradient.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from composer_plugins.kernels.linear.tiles import (
    Bias,
    Head,
    Hidden,
    Weight,
    add_product,
    autocast,
    blocks,
    check_head,
    check_mask,
    head_of,
    numbers_of,
    pick,
    spread,
    without_autocast,
)
from composer_plugins.kernels.masking import wide
from composer_plugins.kernels.types import Mask, Tokens

IMPOSSIBLE = -1e4  # exp() of it is exactly 0 in every dtype, and unlike -inf it may be multiplied by 0


def log_probs(
    hidden: Hidden,
    weight: Weight,
    targets: Int[Tensor, "*batch tokens"],
    mask: Mask,
    *,
    bias: Bias | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
) -> Tokens | tuple[Tokens, Tokens]:
    """log pi(y_t) of the targets, in nats; with `entropy` also the entropy of each distribution.

    Both are float32 at least, and exactly 0 where masked, whatever is there. Differentiable once, in hidden,
    weight and bias. Masked tokens cost nothing, and tokens whose incoming gradient is 0 cost no backward.
    Under autocast the operands are converted as `torch.nn.functional.linear` converts them.
    Raises ValueError for shapes that do not belong together, and for an unmasked target that the vocabulary
    does not have.
    """
    if not hidden.shape[:-1] == targets.shape == mask.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)}, targets {list(targets.shape)} and mask {list(mask.shape)} "
            "do not belong together: one target and one mask entry per token"
        )
    check_mask(mask)
    hidden, weight, bias = autocast(hidden, weight, bias)
    check_head(hidden, weight, bias)
    logprobs, entropies, *_ = _log_probs(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        targets.reshape(-1),
        mask.reshape(-1),
        numbers_of(logit_scale, softcap, temperature),
        entropy,
    )
    shaped = logprobs.view(mask.shape)
    return (shaped, entropies.view(mask.shape)) if entropy else shaped


@torch.library.custom_op("composer_plugins::linear_log_probs", mutates_args=())
@without_autocast
def _log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor,
    numbers: list[float],
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log p, H or empty, z_y, o), each [tokens] and 0 where masked."""
    size, dtype = len(mask), wide(hidden.dtype)
    rows = mask.nonzero().squeeze(-1)
    states, targets, head = pick(hidden, rows), pick(targets, rows), head_of(weight, bias, numbers)
    if ((targets < 0) | (targets >= weight.shape[0])).any():
        raise ValueError(f"targets: an unmasked one is outside of the vocabulary, [0, {weight.shape[0]})")
    own, others, of_others = (torch.empty(rows.shape, dtype=dtype, device=hidden.device) for _ in range(3))
    some, parts = blocks(len(rows), weight.shape[0], hidden)
    for block in some:
        found = _stream(head, parts, states[block], targets[block], entropy)
        own[block], others[block], of_others[block] = found
    gap = own - others
    entropies = _coin(gap) + gap.neg().sigmoid() * of_others if entropy else gap.new_zeros(0)
    logprobs, own, others = (spread(x, rows, size) for x in (F.logsigmoid(gap), own, others))
    return logprobs, spread(entropies, rows, size) if entropy else entropies, own, others


def _stream(
    head: Head, parts: list[slice], states: Tensor, targets: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (z_y, o, H_o or 0) of some rows, from one part of the vocabulary after the other."""
    dtype = wide(states.dtype)
    own = torch.full(targets.shape, -torch.inf, dtype=dtype, device=states.device)
    most, total, moment = own.clone(), torch.zeros_like(own), torch.zeros_like(own)
    for entries in parts:
        logits = head.cut(entries).logits(states)
        inside, column = _column(targets, entries)
        at_column = logits.gather(1, column)
        own = torch.where(inside, at_column[:, 0], own)
        logits.scatter_(1, column, torch.where(inside[:, None], -torch.inf, at_column))
        most_now = torch.maximum(most, logits.amax(1))
        finite = most_now.clamp(min=torch.finfo(dtype).min)  # -inf - -inf would be NaN
        logits.sub_(finite[:, None])
        change = most.clamp(min=torch.finfo(dtype).min) - finite
        factor = change.exp()
        weights = logits.exp() if entropy else logits.exp_()
        if entropy:
            moment = (moment + total * change) * factor
            moment += logits.clamp_(min=torch.finfo(dtype).min).mul_(weights).sum(1)
        total = total * factor + weights.sum(1)
        most = most_now
        del logits, weights  # before the next tile is made
    return own, most + total.log(), torch.where(total > 0, total.log() - moment / total, 0.0)


def _column(targets: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Whether each target is among the entries [rows], and its column there [rows, 1], or any."""
    size = entries.stop - entries.start
    local = targets - entries.start
    return (local >= 0) & (local < size), local.clamp(0, size - 1).unsqueeze(1)


def _coin(gap: Tensor) -> Tensor:
    """The entropy of a coin whose sides have the log-odds `gap`."""
    both = torch.stack([F.logsigmoid(gap), F.logsigmoid(-gap)])
    return -torch.where(both == -torch.inf, 0.0, both.exp() * both).sum(0)


@_log_probs.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, _, entropy = others[-3:]

    def made(size: torch.Size | int) -> Tensor:
        return hidden.new_empty(size, dtype=wide(hidden.dtype))

    return made(mask.shape), made(mask.shape if entropy else 0), made(mask.shape), made(mask.shape)


@torch.library.custom_op("composer_plugins::linear_log_probs_backward", mutates_args=())
@without_autocast
def _backward(
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    mask: Tensor,
    own: Tensor,
    others: Tensor,
    entropies: Tensor,
    numbers: list[float],
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden, weight and bias; an empty tensor for each that is not wanted."""
    dtype, head = wide(hidden.dtype), head_of(weight, bias, numbers)
    incoming = [g for g in (by_logprob, by_entropy) if g is not None]
    rows = (mask & torch.stack([g != 0 for g in incoming]).any(0)).nonzero().squeeze(-1)
    states, targets, own, others = (pick(x, rows) for x in (hidden, targets, own, others))
    g = torch.zeros_like(own) if by_logprob is None else pick(by_logprob, rows)
    log_p = F.logsigmoid(own - others)
    at_target, all_log = g * (others - own).sigmoid(), torch.logaddexp(own, others)
    if by_entropy is not None:
        h, entropy = pick(by_entropy, rows), pick(entropies, rows)
        at_target = at_target - h * torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p + entropy))
    by_hidden = torch.zeros_like(states if wanted[0] else states[:0], dtype=dtype)
    by_weight = torch.zeros_like(weight if wanted[1] else weight[:0])
    by_bias = by_weight.new_zeros(weight.shape[0] if wanted[2] else 0, dtype=dtype)
    some, parts = blocks(len(rows), weight.shape[0], hidden)
    for entries in parts:
        part = head.cut(entries)
        by_part = by_weight[entries].to(dtype)  # a view, unless it is in half precision
        for block in some:
            logits = part.logits(states[block])
            slope = part.slope(logits)
            log_ps = logits.sub_(all_log[block, None])
            if by_entropy is None:
                by_logits = log_ps.exp_().mul_(-g[block, None])
            else:
                p = log_ps.exp()
                by_logits = log_ps.clamp_(min=IMPOSSIBLE).add_(entropy[block, None]).mul_(-h[block, None])
                by_logits = by_logits.sub_(g[block, None]).mul_(p)
            inside, column = _column(targets[block], entries)
            at_column = torch.where(inside[:, None], at_target[block, None], by_logits.gather(1, column))
            by_logits.scatter_(1, column, at_column)
            if not isinstance(slope, float) or slope != 1:
                by_logits.mul_(slope)
            if wanted[2]:
                by_bias[entries] += by_logits.sum(0)
            if wanted[0]:
                add_product(by_hidden[block], by_logits, part.weight)
            if wanted[1]:
                add_product(by_part, by_logits.t(), states[block], rounded=True)
        if by_part.dtype != by_weight.dtype:
            by_weight[entries] = by_part
    if not wanted[0]:
        return hidden.new_zeros(0), by_weight, by_bias.to(weight.dtype)
    return spread(by_hidden.to(hidden.dtype), rows, len(mask)), by_weight, by_bias.to(weight.dtype)


@_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    (hidden, weight), wanted = inputs[2:4], inputs[-1]
    by_hidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    by_weight = torch.empty_like(weight if wanted[1] else weight[:0])
    return by_hidden, by_weight, weight.new_empty(weight.shape[0] if wanted[2] else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, bias, targets, mask, numbers, _ = inputs
    _, entropies, own, others = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, bias, targets, mask, own, others, entropies)
    ctx.numbers = numbers


def _differentiate(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None, *_: None) -> Any:
    if by_logprob is None and by_entropy is None:
        return (None,) * 7
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward(by_logprob, by_entropy, *ctx.saved_tensors, ctx.numbers, wanted)
    return (*(x if want else None for x, want in zip(found, wanted, strict=True)), *(None,) * 4)


_log_probs.register_autograd(_differentiate, setup_context=_setup_context)
