"""GRPOTrainer's policy losses: TRL's switches as compositions of our kernels.

The kernel of a `loss_type`, through its catalogue row, then factors and terms on its loss per token, then
TRL's denominator.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.conformance.claims import GRADIENT, Compared, with_gradients
from composer_plugins.conformance.reductions import kernel, mean
from composer_plugins.conformance.trl_claims import upstream
from composer_plugins.conformance.trl_claims.grpo_options import Options, draw_options
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.frameworks.trl import TRL
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.entropy import entropy_bonus, high_entropy_mask
from composer_plugins.kernels.policy.masked import off_policy_sequence_mask, sequence_drift
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.draws import Draw, assume, flag, generator, token_batch

Batch = dict[str, Tensor]
LOWEST = math.log(1e-8)  # to which TRL's VESPO clamps a sequence's log ratio, ours to -20

# By loss_type and level, the row that users run.
ROWS = {(one.options["loss_type"], one.options["importance_sampling_level"]): one.row for one in TRL.losses}


def draw_batch(draw: Draw) -> Batch:
    """What any policy loss of TRL reads; `old` may be missing (on-policy) or 40 nats away."""
    batch = token_batch(draw)
    g = generator(draw, "the rest")
    shape = batch["mask"].shape

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    stale = draw.choose([0.0, 0.0, 40.0, None], "how stale")
    batch["logprobs"].requires_grad_()
    batch["old_logprobs"] = batch["logprobs"].detach() if stale is None else batch["old_logprobs"] - stale
    batch["on_policy"] = torch.tensor(stale is None)
    batch["ref_logprobs"] = batch["logprobs"].detach() + normal(*shape)
    batch["rollout_logprobs"] = batch["old_logprobs"] + 0.3 * normal(*shape)
    batch["entropies"] = 2 * torch.rand(shape, generator=g).double()  # TRL compares them as float32
    batch["advantages"] = draw.choose([1.0, 1.0, 0.0], "signal") * batch["advantages"]
    width = shape[1] if flag(draw, "weights per token") else 1
    weights = (0.5 * normal(shape[0], width)).exp() * (normal(shape[0], width) > -1)
    batch["weights"] = torch.where(batch["mask"] | (width < shape[1]), weights, 1.0)
    return batch


def trl_loss(batch: Batch, o: Options, cls: type = GRPOTrainer) -> Tensor:
    """TRL's loss; a threshold reads the rollout's log-probabilities, and vLLM's weights are given."""
    given = upstream.grpo_inputs(
        batch["mask"],
        batch["advantages"].squeeze(-1),
        old_per_token_logps=None if batch["on_policy"] else batch["old_logprobs"],
        ref_per_token_logps=batch["ref_logprobs"],
        sampling_per_token_logps=batch["rollout_logprobs"],
        importance_sampling_ratio=batch["weights"] if o.use_vllm else None,
    )
    return upstream.policy_loss(upstream.grpo_trainer(o), batch["logprobs"], batch["entropies"], given, cls)


def inputs(batch: Batch) -> tuple[Tensor, ...]:
    """In the order of a policy kernel."""
    return tuple(batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask"))


def acts_on(batch: Batch, o: Options) -> Tensor:
    """TRL's top_entropy_quantile."""
    if o.top_entropy_quantile == 1:
        return batch["mask"]
    return high_entropy_mask(batch["entropies"], batch["mask"], fraction=o.top_entropy_quantile)


def token_loss(batch: Batch, o: Options) -> Tensor:
    """The kernel of a `loss_type`, then TRL's factors in its order, then the KL."""
    logprobs, old, advantages, mask = inputs(batch)
    level = o.importance_sampling_level
    name = TRL.row_of(loss_type=o.loss_type, importance_sampling_level=level) or ""
    keywords = TRL.parameters(find_one(name, "policy").loss, o.of_its_loss())
    optional = {"log_weights": batch["weights"].log()} if o.loss_type == "vespo" and o.use_vllm else {}
    token = kernel("policy", name, **keywords)(logprobs, old, advantages, mask, **optional)
    if o.off_policy_mask_threshold is not None:
        drift = sequence_drift(logprobs, batch["rollout_logprobs"], mask)
        kept = off_policy_sequence_mask(drift, advantages, threshold=o.off_policy_mask_threshold)
        token = TokenLoss(token.loss * kept, {})
    loss: Tensor = token.loss * acts_on(batch, o)
    if o.use_vllm and o.loss_type != "vespo":
        loss = corrected(TokenLoss(loss, {}), batch["weights"], mask).loss
    if o.use_bias_correction_kl:
        penalty = kernel("kl", "k3_corrected@trl", level=level)(logprobs, old, batch["ref_logprobs"], mask)
        return loss + o.beta * penalty
    return loss + o.beta * kernel("kl", "k3@trl")(logprobs, batch["ref_logprobs"], mask)


def reduced(x: Tensor, mask: Tensor, o: Options) -> Tensor:
    """TRL's denominators: an empty row is a sequence, and the count of tokens spans the whole window."""
    mode = TRL.denominators[o.loss_type]
    if mode == "bnpo":  # a token mean of the micro-batch
        return mean("token-mean@trl")(x, mask) / o.steps
    tokens = float(mask.sum().clamp(min=1))  # of the generation batch: all ranks and all its steps
    counts = {"num_sequences": len(mask), "max_length": o.max_completion_length, "num_tokens": tokens}
    loss = mean(f"{mode}@trl", **counts)(x, mask)
    if mode != "token-mean":
        return loss / o.steps
    return loss * o.processes * (o.steps_per_generation / o.steps if o.training else 1.0)


def penalty_terms(batch: Batch, o: Options) -> Tensor:
    """Bounds, per row, what cancels within a token's loss: exp(-d) + d - 1, times its ratio."""
    logprobs, old, _, mask = inputs(batch)
    d = torch.where(mask, (logprobs.detach() - batch["ref_logprobs"]).abs(), 0.0)
    ratio = torch.where(mask, logprobs.detach() - old, 0.0).clamp(min=0).exp()
    largest = (d.exp() + d + 1) * (ratio if o.use_bias_correction_kl else 1)
    return o.beta * largest.amax(-1, keepdim=True)


def roundings_of_vespo(batch: Batch, o: Options) -> Tensor:
    """Bounds, per row, by how much more than 1 rounding VESPO's weight is wrong.

    It is exp(x) of x = k sum(log r) + lambda (1 - w), and a rounding of x is relative to the terms of x.
    """
    logprobs, old, _, mask = inputs(batch)
    log_r = torch.where(mask, logprobs.detach() - old, 0.0).clamp(-20, 20)
    log_weights = torch.where(mask, batch["weights"].log(), 0.0) * o.use_vllm
    k, scale = max(o.vespo_k_pos, o.vespo_k_neg), max(o.vespo_lambda_pos, o.vespo_lambda_neg)
    w = (log_r + log_weights).sum(-1, keepdim=True).clamp(-20, 20).exp()
    return k * (log_r.abs() + log_weights.abs()).sum(-1, keepdim=True) + scale * (1 + w)


def compare(loss_type: str, level: str, draw: Draw) -> Iterator[Compared]:
    """A `loss_type` with any mixture of options: clips, KL, masks, entropy bonus, weights, accumulation."""
    batch = draw_batch(draw)
    o = draw_options(draw).replace(loss_type=loss_type, importance_sampling_level=level)
    if loss_type == "vespo":
        stays_inside_trls_clamps(batch)
    theirs = trl_loss(batch, o)
    per_token = token_loss(batch, o)
    ours = reduced(per_token, batch["mask"], o)
    acting = acts_on(batch, o)
    bonus = entropy_bonus(batch["entropies"], acting, weight=o.entropy_coef).loss
    ours = ours + aggregate(bonus, acting, "token-mean") / o.steps
    # To within rounding of the largest term that a token adds.
    noise = penalty_terms(batch, o)
    share = torch.autograd.grad(ours, per_token, retain_graph=True)[0].abs()
    more = 1 + roundings_of_vespo(batch, o) if loss_type == "vespo" else torch.ones(())
    of_bonus = bonus.abs() / (acting.sum().clamp(min=1) * o.steps)  # its mean has a denominator of its own
    largest = float((share * (per_token.detach().abs() * more + noise) + of_bonus).max())
    yield Compared(ours, theirs, per_token.numel(), largest)
    (mine,), (want,) = (torch.autograd.grad(x, batch["logprobs"]) for x in (ours, theirs))
    magnitude = max(float((want.abs() * more).max()), float((share * noise).max()))
    yield Compared(mine, want, per_token.numel(), magnitude, what=GRADIENT)


def opsm(draw: Draw) -> Iterator[Compared]:
    """TRL's off_policy_mask_threshold with its clipped loss is a loss of its own here."""
    batch, threshold = draw_batch(draw), draw.choose([0.0, 0.3], "off_policy_mask_threshold")
    o = Options(loss_type="dapo", off_policy_mask_threshold=threshold)
    row = kernel("policy", "opsm@trl", threshold=threshold)
    needs = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")
    token = row(*(batch[name] for name in needs))
    theirs, ours = trl_loss(batch, o), reduced(token.loss, batch["mask"], o)
    largest = float(token.loss.detach().abs().max())
    yield from with_gradients(ours, theirs, batch["logprobs"], terms=token.loss.numel(), magnitude=largest)


def stays_inside_trls_clamps(batch: Batch) -> None:
    """One weight per token, as TRL asks of VESPO, and no ratio below 1e-8."""
    logprobs, old, _, mask = inputs(batch)
    batch["weights"] = batch["weights"].expand(mask.shape).where(mask & (batch["weights"] > 0), 1.0)
    log_r = (logprobs.detach() - old).clamp(-20, 20)
    assume(float(torch.where(mask, log_r + batch["weights"].log(), 0.0).sum(-1).min()) > LOWEST)
    assume(float(torch.where(mask, log_r, 0.0).sum(-1).min()) > LOWEST)


CLAIMS = [
    *(
        claim(
            "policy",
            row,
            "GRPOTrainer",
            loss_type + ", sequence" * (level == "sequence"),
            partial(compare, loss_type, level),
            loss_type=loss_type,
            importance_sampling_level=level,
        )
        for (loss_type, level), row in ROWS.items()
    ),
    claim("policy", "opsm@trl", "GRPOTrainer", "off_policy_mask_threshold", opsm, loss_type="dapo"),
]
