"""`ComposerLoss`: torchtitan's tensors -> a loss of the catalogue -> torchtitan's denominator.

This module imports torchtitan, and a function that makes a config of torchtitan imports it.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import BaseLoss, compute_logprobs

from composer_plugins.adapters.torchtitan_loss.options import DEFAULT_POLICY, requested
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.torchtitan import TORCHTITAN
from composer_plugins.health.watch import Health, per_token
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call
from composer_plugins.losses.finite import FiniteCheck
from composer_plugins.losses.masks import boolean_mask

SAME = 1e-6  # nats: torchtitan counts a token as different from here on


class ComposerLoss(BaseLoss):
    """Any policy loss of the catalogue whose terms depend on single tokens, in torchtitan's RL trainer.

    The loss is the sum over the response tokens, divided by `global_valid_tokens`: over all micro-batches and
    ranks the mean per token. A token whose generator log-probability is not finite is left out, as in
    torchtitan's own losses and in its count. The old policy of a loss is the generator's.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """The loss by name, checked when the config is made: ConfigError says what torchtitan cannot run."""

        policy: str = DEFAULT_POLICY
        """A loss ("cispo"), a dialect ("cispo@verl"), or an import path ("my_package.losses:my_loss")."""
        policy_params: dict[str, Any] = field(default_factory=dict)
        """Its parameters: `composer-plugins explain cispo` lists them."""
        policy_weight: float = 1.0
        """The loss is multiplied by it."""
        health: bool = True
        record_batches: str | None = None
        record_every: int = 1
        """Whether the run is measured and warned of; where to record micro-batches, and of which steps."""
        hint_weight: float = 0.0
        replay_weight: float = 0.0
        """torchtitan cannot carry these two terms: a number above 0 is an error."""

        def __post_init__(self) -> None:
            requested(asdict(self))

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        del compile_config  # torchtitan's own losses of RL are not compiled either
        asked = requested(asdict(config))
        self.policy = asked.choice
        self.weight = asked.config.policy_weight
        self.is_first = True
        self.health = Health.of(asked.config, asked.choice, "torchtitan", "token-mean")
        self.require_finite = FiniteCheck(f"policy {self.policy.name!r}")

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        temperature: Any = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The share [] of one micro-batch, and metrics whose sums over micro-batches are means per token.

        `logits` are [B, L, V], and [T, V] in torchtitan after 0.3.0; the other tensors have one value per
        token. Without `global_valid_tokens` it is the sum, as of torchtitan's own losses.
        Raises DataError for tensors that are not what a loss takes, at the first call, and for a loss that is
        not finite, on a GPU some calls later; ConfigError for a temperature, which a newer torchtitan has.
        """
        if isinstance(temperature, Tensor) or temperature not in (None, 1):
            problem = f"torchtitan passes a temperature, so it is newer than the tested {TORCHTITAN.release}"
            remedy = f"install torchtitan {TORCHTITAN.release}, or set the temperature to 1"
            raise ConfigError("loss", problem, remedy)
        logprobs, entropy = compute_logprobs(logits, labels, return_entropy=True)
        of_response = boolean_mask("loss_mask", loss_mask, check=self.is_first)
        mask = of_response & generator_logprobs.isfinite()
        tensors = {"logprobs": logprobs, "advantages": advantages, "mask": mask}
        tensors |= dict.fromkeys(("old_logprobs", "rollout_logprobs"), generator_logprobs)
        token = call(self.policy, tensors, check=self.is_first)
        self.is_first = False
        tokens = 1 if global_valid_tokens is None else global_valid_tokens

        def share(values: Tensor, where: Tensor = mask) -> Tensor:
            found: Tensor = aggregate(values, where, "token-mean", num_tokens=tokens)
            return found

        loss = self.weight * share(token.loss)
        given, counts = {**tensors, "entropies": entropy}, {"num_tokens": tokens}
        how: dict[str, Any] = {"loss": loss, "counts": counts, "factor": self.weight}
        how["without"] = ("surprise",)  # which not every call has, and the names have to be the same
        measured = self.health.micro_batch(given, token.metrics, **how)
        self.require_finite(loss, tensors)
        with torch.no_grad():
            difference = torch.where(mask, logprobs - generator_logprobs, 0.0)
            metrics = {
                "loss/mean": loss.detach(),
                "bit_wise/logprob_diff/mean": share(difference),
                "bit_wise/ratio_tokens_different/mean": share((difference.abs() > SAME).float()),
                "bit_wise/logprob_diff/max": difference.abs().max(),
                "trainer/entropy/mean": share(entropy),
                **{
                    f"composer/{name}/mean": share(one.value.float(), one.where)
                    for name, one in (token.metrics | per_token(measured, mask)).items()
                },
            }
        return loss, metrics
