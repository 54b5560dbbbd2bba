"""Policy losses as verl calls them: in an actor's worker, once per micro-batch, by keyword."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.rules import ParsedOnce, check_scale_factor
from composer_plugins.adapters.verl_plugin.upstream import norm_mode_is_a_sum
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import (
    BY_GEOMETRIC_MEAN,
    CLIPPED_BY_SIGN,
    FORCED_MODES,
    NEVER_CLIPPED,
    NORM_MODE,
    Key,
)
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.calling import call, differ_by_token, differing_advantages
from composer_plugins.losses.choosing import Choice

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]
DENOMINATORS = {"num_tokens": "batch_num_tokens", "num_sequences": "global_batch_size"}
CHANGED = ("clip_frac", "mask_frac")  # how our metrics begin that mark the tokens of a clip or a mask
DIFFER = "advantages_differ"
MASKED = "mask_frac_low"  # what a loss reports whose trust region masks tokens


def policy_loss(name: str | None) -> PolicyLoss:
    """Return the loss mode `composer/<name>`; for None `composer`, which reads `composer.policy`."""
    options = ParsedOnce("policy", name)

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: Mode = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the scalar loss, divided by verl's denominators of the whole batch, and the metrics.

        `old_log_prob` is the policy before verl's update. A loss that compares with the rollout policy
        (DPPO) gets it in place of the rollout policy's, as verl's own does: with bypass_mode they are equal.
        verl's own options of the loss (`clip_ratio_high` ...) set the parameters of ours: `verl.OPTIONS`.
        """
        parsed, is_new = options(config, getattr(config, "policy_loss", None), loss_agg_mode)
        composer, choice = parsed.config, parsed.choice
        mask = response_mask.bool()
        tensors = {"logprobs": log_prob, "old_logprobs": old_log_prob, "rollout_logprobs": old_log_prob}
        tensors |= {"advantages": advantages, "mask": mask}
        token: TokenLoss = call(choice, tensors, check=is_new)
        logged = {f"composer/policy/{name}": metric for name, metric in token.metrics.items()}
        logged |= verl_metrics(choice, tensors, token.metrics)
        if rollout_is_weights is not None:
            of_row = choice.name in BY_GEOMETRIC_MEAN
            weights = geometric_mean(rollout_is_weights, mask) if of_row else rollout_is_weights
            token = corrected(token, weights, mask)
        mode = FORCED_MODES.get(choice.name, loss_agg_mode)
        # The counts of the whole batch; verl 0.6 has none and divides by those of the micro-batch.
        scalar = reduce(token.loss, mask, mode, dict(getattr(config, "global_batch_info", None) or {}))
        weighted = scalar if composer.policy_weight == 1 else composer.policy_weight * scalar
        if choice.loss.per_sequence:  # read with the metrics, in one transfer from the device
            differ = differ_by_token(advantages, mask)
            logged[DIFFER] = Metric(differ.float(), torch.ones_like(differ))
        found = means(logged, "actor/")
        if found.pop(f"actor/{DIFFER}", 0.0):
            raise differing_advantages(choice.loss)
        return weighted, found

    loss.__name__ = loss.__qualname__ = f"composer_{name or 'policy_loss'}"
    return loss


def reduce(token_loss: Tensor, mask: Tensor, mode: Mode, info: dict[str, Any]) -> Tensor:
    """Return what verl's agg_loss returns: the sum over the global batch's denominator, times the ranks.

    DDP and FSDP take the mean of the ranks' gradients; that factor turns it into the sum.
    """
    check_scale_factor(info.get("loss_scale_factor"))
    length = info.get("loss_scale_factor") or mask.shape[-1]
    if mode == NORM_MODE and norm_mode_is_a_sum():
        return aggregate(token_loss, mask, mode, num_sequences=1, max_length=length)
    ranks = info.get("dp_size") or 1
    counts = {ours: info.get(theirs) for ours, theirs in DENOMINATORS.items()}
    needed = {"token-mean": "num_tokens", "token-sum": None}.get(mode, "num_sequences")
    if ranks > 1 and needed is not None and counts[needed] is None:
        problem = f"{mode!r} on {ranks} ranks needs {DENOMINATORS[needed]}, which verl did not pass"
        raise ConfigError(Key.AGG_MODE, problem, "set token-sum, or train on one rank")
    return ranks * aggregate(token_loss, mask, mode, **counts, max_length=length)


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Return for each row the geometric mean of its tokens' weights, with verl's bound for weights of 0."""
    log_weights = torch.where(mask, (weights + 1e-10).log(), 0.0)
    return sequence_log_ratio(log_weights, mask).exp().expand(mask.shape)


def verl_metrics(
    choice: Choice, tensors: Mapping[str, Tensor], metrics: Mapping[str, Metric]
) -> dict[str, Metric]:
    """Return verl's own metrics of a policy loss, with the meaning that they have in verl's loss of its kind.

    `ppo_kl` is the mean of log old(y) - log pi(y), clamped as in the loss. `pg_clipfrac` counts the tokens
    that the clip or the mask changes. `pg_clipfrac_lower` counts those beyond the second bound (`dual_clip`,
    `ratio_cap`): where A < 0, or, in a loss that masks tokens, where the token is not masked out. A loss that
    reports no clip and no mask has neither.
    """
    mask, advantages, name = tensors["mask"], tensors["advantages"], choice.loss.name
    old, clamp = tensors["old_logprobs"], choice.value("log_ratio_clamp")
    log_r = log_ratio(tensors["logprobs"].detach(), old, mask, clamp=clamp)
    lower = changed = torch.zeros_like(mask)
    sides = [metric for key, metric in metrics.items() if key.startswith(CHANGED)]
    bounds = [bound for key in ("dual_clip", "ratio_cap") if (bound := choice.value(key)) is not None]
    if name in CLIPPED_BY_SIGN:
        outside = (log_r < -choice.value("clip_low")) | (log_r > choice.value("clip_high"))
        changed, lower = outside & (advantages > 0), outside & (advantages < 0)
    elif sides:
        for value, where in sides:
            changed = changed | (value.bool() & where)
        if bounds and "ratio" in metrics and choice.value("level") != "sequence":  # else a product is capped
            beyond = metrics["ratio"].value > min(bounds)
            lower = beyond & (~changed if MASKED in metrics else advantages < 0)
    elif name not in NEVER_CLIPPED:
        return {"ppo_kl": Metric(-log_r, mask)}
    found = {"ppo_kl": -log_r, "pg_clipfrac": changed, "pg_clipfrac_lower": lower}
    return {key: Metric(value, mask) for key, value in found.items()}


def means(metrics: Mapping[str, Metric], prefix: str) -> dict[str, float]:
    """Return the mean of each metric over its `where`, with one transfer from the device."""
    if not metrics:
        return {}
    found = [
        torch.where(where, value, 0.0).sum() / where.sum().clamp(min=1) for value, where in metrics.values()
    ]
    values = torch.stack([mean.float() for mean in found]).tolist()
    return {f"{prefix}{name}": value for name, value in zip(metrics, values, strict=True)}
