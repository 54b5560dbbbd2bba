"""Policy losses as verl calls them: in an actor's worker, once per micro-batch, by keyword."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.verl_plugin.options import INPUTS, AskedOnce
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import (
    BY_GEOMETRIC_MEAN,
    CLIPPED_BY_SIGN,
    FORCED_MODES,
    NEVER_CLIPPED,
    Key,
)
from composer_plugins.health.measuring import CHANGED
from composer_plugins.health.watch import OURS, Health, per_token
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.calling import call, differ_by_token, differing_advantages
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.losses.metrics import means

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]
DIFFER = "advantages_differ"
# By the count of a record, verl's name of it.
COUNTS = {"num_tokens": "batch_num_tokens", "num_sequences": "global_batch_size"}
COUNTS |= {"max_length": "loss_scale_factor"}
MASKED = "mask_frac_low"  # what a loss reports whose trust region masks tokens


def policy_loss(name: str | None) -> PolicyLoss:
    """Return the loss mode `composer/<name>`; for None `composer`, which reads `composer.policy`."""
    options = AskedOnce("policy", name)
    metrics: VerlMetrics  # of the choice that was parsed last
    health = Health(on=False)
    is_checked = False  # whether it has had a micro-batch with an unmasked token, whose values were checked

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
        composer_sync has the rollout policy's, and the reference's (`options.from_batch`).
        verl's own options of its losses (`clip_ratio_high` ...) set no parameter of our losses.
        """
        nonlocal metrics, is_checked, health
        asked, is_new = options(config, getattr(config, "policy_loss", None), loss_agg_mode)
        composer, choice = asked.config, asked.choice
        mode: Any = FORCED_MODES.get(choice.name, loss_agg_mode)
        info = dict(getattr(config, "global_batch_info", None) or {})  # the counts of the whole batch
        if is_new:
            is_checked, health = False, Health.of(composer, choice, "verl", mode)
            metrics = VerlMetrics.of(choice)
        mask = boolean_mask("response_mask", response_mask, check=not is_checked)
        tensors = {"logprobs": log_prob, "old_logprobs": old_log_prob, "rollout_logprobs": old_log_prob}
        tensors |= {"advantages": advantages, "mask": mask, **INPUTS.get()}
        token: TokenLoss = call(choice, tensors, check=not is_checked)
        is_checked = is_checked or bool(mask.any())
        logged = metrics(tensors, token.metrics)
        logged |= {f"composer/policy/{key}": metric for key, metric in token.metrics.items()}
        if rollout_is_weights is not None:
            of_row = choice.name in BY_GEOMETRIC_MEAN
            weights = geometric_mean(rollout_is_weights, mask) if of_row else rollout_is_weights
            token = corrected(token, weights, mask)
        scalar = reduce(token.loss, mask, mode, info)
        ranks, rows = info.get("dp_size") or 1, info.get("global_batch_size") or len(mask)
        counts = {ours: info[name] for ours, name in COUNTS.items() if info.get(name) is not None}
        how: dict[str, Any] = {
            "loss": scalar if rollout_is_weights is None else None,
            "counts": counts,
            "factor": ranks,
        }
        found = health.micro_batch(tensors, token.metrics, rows=rows / ranks, without=("kl",), **how)
        logged |= {OURS + key: metric for key, metric in per_token(found, mask).items()}
        weighted = scalar if composer.policy_weight == 1 else composer.policy_weight * scalar
        if choice.loss.per_sequence:  # read with the metrics, in one transfer from the device
            differ = differ_by_token(advantages, mask)
            logged[DIFFER] = Metric(differ.float(), torch.ones_like(differ))
        reported = means(logged, "actor/")
        if reported.pop(f"actor/{DIFFER}", 0.0):
            raise differing_advantages(choice.loss)
        return weighted, reported

    loss.__name__ = loss.__qualname__ = f"composer_{name or 'policy_loss'}"
    return loss


def reduce(token_loss: Tensor, mask: Tensor, mode: Mode, info: Mapping[str, Any]) -> Tensor:
    """Return what verl's agg_loss returns: the sum over the global batch's denominator, times the ranks.

    DDP and FSDP take the mean of the ranks' gradients; that factor turns it into the sum.
    """
    length = info.get("loss_scale_factor") or mask.shape[-1]
    ranks = info.get("dp_size") or 1
    tokens, rows = info.get("batch_num_tokens"), info.get("global_batch_size")
    needed = {"token-mean": "batch_num_tokens", "token-sum": None}.get(mode, "global_batch_size")
    if ranks > 1 and needed is not None and info.get(needed) is None:
        problem = f"{mode!r} on {ranks} ranks needs {needed}, which verl did not pass"
        raise ConfigError(Key.AGG_MODE, problem, "set token-sum, or train on one rank")
    return ranks * aggregate(token_loss, mask, mode, num_tokens=tokens, num_sequences=rows, max_length=length)


def geometric_mean(weights: Tensor, mask: Tensor) -> Tensor:
    """Return for each row the geometric mean of its tokens' weights, with verl's bound for weights of 0."""
    log_weights = torch.where(mask, (weights + 1e-10).log(), 0.0)
    return sequence_log_ratio(log_weights, mask).exp().expand(mask.shape)


class VerlMetrics(NamedTuple):
    """verl's own metrics of a policy loss, with the meaning that they have in verl's loss of its kind."""

    clamp: float | None  # of the log ratio, in nats
    second_bound: float | None  # of the ratio: dual_clip or ratio_cap; None: none, or one of a product
    by_sign: tuple[float, float] | None  # bounds of the log ratio, where each sign of A has its metric
    is_never_clipped: bool

    @classmethod
    def of(cls, choice: Choice) -> "VerlMetrics":
        """Return what is counted for this loss."""
        name, value = choice.loss.name, choice.value
        bounds = [bound for key in ("dual_clip", "ratio_cap") if (bound := value(key)) is not None]
        second = min(bounds) if bounds and value("level") != "sequence" else None
        by_sign = (value("clip_low"), value("clip_high")) if name in CLIPPED_BY_SIGN else None
        return cls(value("log_ratio_clamp"), second, by_sign, name in NEVER_CLIPPED)

    def __call__(self, tensors: Mapping[str, Tensor], metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Return `ppo_kl`, and for a loss that reports a clip or a mask the fractions of tokens.

        `ppo_kl` is the mean of log old(y) - log pi(y), clamped as in the loss. `pg_clipfrac` counts the
        tokens that the clip or the mask changes. `pg_clipfrac_lower` counts those beyond the second bound:
        where A < 0, or, in a loss that masks tokens, where the token is not masked out.
        """
        mask, advantages = tensors["mask"], tensors["advantages"]
        log_r = log_ratio(tensors["logprobs"].detach(), tensors["old_logprobs"], mask, clamp=self.clamp)
        none = lower = changed = torch.zeros_like(mask)
        if self.by_sign is not None:
            outside = (log_r < -self.by_sign[0]) | (log_r > self.by_sign[1])
            changed, lower = outside & (advantages > 0), outside & (advantages < 0)
        else:
            for key, (value, where) in metrics.items():
                if key.startswith(CHANGED):
                    changed = changed | (value.bool() & where)
            if changed is none and not self.is_never_clipped:
                return {"ppo_kl": Metric(-log_r, mask)}
            if self.second_bound is not None and "ratio" in metrics:
                beyond = metrics["ratio"].value > self.second_bound
                lower = beyond & (~changed if MASKED in metrics else advantages < 0)
        return {
            "ppo_kl": Metric(-log_r, mask),
            "pg_clipfrac": Metric(changed, mask),
            "pg_clipfrac_lower": Metric(lower, mask),
        }
