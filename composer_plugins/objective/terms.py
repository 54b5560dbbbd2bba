"""The terms of a loss on one number per sampled token, as every framework of that kind computes them."""

from collections.abc import Mapping

from torch import Tensor

from composer_plugins.config import ComposerConfig
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice


def policy_term(
    policy: Choice,
    given: Mapping[str, Tensor],
    correction: Choice | None = None,
    correction_mask: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    *,
    check: bool = False,
) -> TokenLoss:
    """The policy loss per token, [*batch, tokens], times the rollout correction if there is one.

    `given` are the inputs by their names. The weights of the correction are old_logprobs over
    rollout_logprobs; without old_logprobs, the policy itself, detached, over rollout_logprobs. They are
    computed at the tokens of `correction_mask`, by default the policy's tokens.
    """
    token: TokenLoss = call(policy, given, check=check)
    if policy.is_third_party:  # a framework adds up every token; ours are 0 at masked ones
        token = TokenLoss(keep(token.loss, given["mask"]), token.metrics)
    if correction is not None:
        mask = given["mask"] if correction_mask is None else correction_mask
        old = given["logprobs"].detach() if old_logprobs is None else old_logprobs
        pair = {"old_logprobs": old, "rollout_logprobs": given["rollout_logprobs"], "mask": mask}
        token = corrected(token, call(correction, pair, check=check), mask)
    return token


def hinted_advantages(
    advantages: Tensor, logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, weight: float
) -> Tensor:
    """A + weight (log T - log pi) at unmasked tokens, without a gradient: the hint as a part of A."""
    gap = at_least_float32(teacher_logprobs) - at_least_float32(logprobs).detach()
    return advantages + weight * keep(gap, mask)


def hint_choice(config: ComposerConfig) -> Choice | None:
    """The divergence of the hint, weighted by policy over rollout; None where no term is added for a hint.

    The rollout policy sampled the tokens: without that weight the estimate is of a KL to an older policy.
    """
    if not config.hint_weight or config.hint_estimator == "advantage":
        return None
    return config.choose_hint().with_optional("old_logprobs")
