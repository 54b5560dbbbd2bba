"""The terms of a loss on one number per sampled token, as every framework of that kind computes them."""

from collections.abc import Mapping

from torch import Tensor

from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.channels import Channels


def policy_term(
    channels: Channels, given: Mapping[str, Tensor], correction_mask: Tensor, *, check: bool = False
) -> TokenLoss:
    """The policy loss per token, [*batch, tokens], times the rollout correction if there is one.

    `given` are the inputs by their names. The weights of the correction are old_logprobs over
    rollout_logprobs; where the policy needs no old_logprobs, those of the policy itself, detached.
    """
    policy, correction = channels.policy, channels.rollout_correction
    token: TokenLoss = call(policy, given, check=check)
    if policy.is_third_party:  # a framework adds up every token; ours are 0 at masked ones
        token = TokenLoss(keep(token.loss, given["mask"]), token.metrics)
    if correction is not None:
        old = given["old_logprobs"] if channels.needs_old else given["logprobs"].detach()
        pair = {"old_logprobs": old, "rollout_logprobs": given["rollout_logprobs"], "mask": correction_mask}
        token = corrected(token, call(correction, pair), correction_mask)
    return token


def hinted_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float
) -> Tensor:
    """A + weight (log T - log pi) at unmasked tokens, without a gradient: the hint as a part of A."""
    gap = at_least_float32(teacher_logprobs) - at_least_float32(logprobs).detach()
    return advantages + weight * keep(gap, mask)


def hint_choice(channels: Channels) -> Choice | None:
    """The divergence of the hint, weighted by policy over rollout; None where the hint is in the advantages.

    The rollout policy sampled the tokens: without that weight the estimate is of a KL to an older policy.
    """
    if channels.hint is None or channels.config.hint_estimator == "advantage":
        return None
    return channels.hint.with_optional("old_logprobs")
