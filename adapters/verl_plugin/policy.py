"""Policy losses as verl calls them: in an actor's worker, once per micro-batch, by keyword."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss

from composer_plugins.adapters.verl_parts.rules import chosen
from composer_plugins.adapters.verl_plugin.config import node_of
from composer_plugins.catalogue import Choice
from composer_plugins.checks import check_inputs
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.kernels.contract import Metric, TokenLoss
from composer_plugins.kernels.corrections import corrected

PolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]
DENOMINATORS = {"num_tokens": "batch_num_tokens", "num_sequences": "global_batch_size"}


def policy_loss(name: str | None) -> PolicyLoss:
    """The loss mode `composer/<name>`, or with None `composer`, which `composer.policy` names."""
    seen: dict[str, tuple[ComposerConfig, Choice]] = {}

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
        """The scalar that verl steps on, by its denominators of the whole batch, and what it logs.

        `old_log_prob` is verl's proximal policy; a loss whose region is around the rollout policy (DPPO)
        is given it too, as verl's own are: set bypass_mode to make it the rollout engine's.
        """
        node = node_of(getattr(config, "policy_loss", None) or {})
        key = repr(sorted(node.items()))
        mask = response_mask.bool()
        given = {
            "logprobs": log_prob,
            "old_logprobs": old_log_prob,
            "rollout_logprobs": old_log_prob,
            "advantages": advantages,
            "mask": mask,
        }
        if key not in seen:
            seen[key] = chosen(node, "policy", name)
            check_inputs(seen[key][1], given)
        composer, choice = seen[key]
        token: TokenLoss = choice.loss.kernel()(*(given[n] for n in choice.loss.needs), **choice.params)
        if rollout_is_weights is not None:
            token = corrected(token, rollout_is_weights, mask)
        scalar = reduced(token.loss, mask, loss_agg_mode, global_batch(config))
        weighted = scalar if composer.policy_weight == 1 else composer.policy_weight * scalar
        return weighted, logged(token.metrics)

    loss.__name__ = loss.__qualname__ = f"composer_{name or 'policy_loss'}"
    return loss


def reduced(token_loss: Tensor, mask: Tensor, mode: Mode, info: dict[str, Any]) -> Tensor:
    """verl's agg_loss: the sum over `mode`'s denominator of the global batch, times the ranks.

    DDP and FSDP take the mean of the ranks' gradients, which the factor undoes.
    """
    length = info.get("loss_scale_factor") or mask.shape[-1]
    if mode == "seq-mean-token-sum-norm" and norm_is_a_sum():
        return aggregate(token_loss, mask, mode, num_sequences=1, max_length=length)
    ranks = info.get("dp_size") or 1
    counts = {ours: info.get(theirs) for ours, theirs in DENOMINATORS.items()}
    wanted = {"token-mean": "num_tokens", "token-sum": None}.get(mode, "num_sequences")
    if ranks > 1 and wanted is not None and counts[wanted] is None:
        raise ConfigError(
            f"loss_agg_mode={mode!r} on {ranks} ranks without {DENOMINATORS[wanted]}: each rank would "
            "divide by its own count"
        )
    return ranks * aggregate(token_loss, mask, mode, **counts, max_length=length)


@cache
def norm_is_a_sum() -> bool:
    """Whether this verl divides "seq-mean-token-sum-norm" by neither sequences nor ranks: before 0.7.1."""
    ones = torch.ones(2, 1)
    return float(agg_loss(ones, ones, "seq-mean-token-sum-norm")) == 2.0


def global_batch(config: Any) -> dict[str, Any]:
    """The counts of the whole batch; verl 0.6 has none and divides by the micro-batch's."""
    return dict(getattr(config, "global_batch_info", None) or {})


def logged(metrics: Mapping[str, Metric], under: str = "") -> dict[str, float]:
    """The mean of each metric where it counts, in one wait for the device."""
    if not metrics:
        return {}
    means = [
        torch.where(where, value, 0.0).sum() / where.sum().clamp(min=1) for value, where in metrics.values()
    ]
    values = torch.stack([mean.float() for mean in means]).tolist()
    return {f"actor/composer/{under}{name}": value for name, value in zip(metrics, values, strict=True)}
