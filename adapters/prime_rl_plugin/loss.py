"""The three channels on one sequence of PRIME-RL: the sum that is returned, and the metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import upstream, values
from composer_plugins.adapters.prime_rl_plugin.metrics import Averages
from composer_plugins.adapters.prime_rl_plugin.options import newer_than_tested
from composer_plugins.errors import Finding, enforce
from composer_plugins.health.watch import Health
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.composer import composer
from composer_plugins.kernels.masking import at_least_float32, keep
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call, differ_by_token, differing_advantages
from composer_plugins.losses.flags import Flags
from composer_plugins.losses.inputs import positive_logprob
from composer_plugins.objective.asking import Asked
from composer_plugins.objective.terms import hint_choice, hinted_advantages, policy_term


class Masks(NamedTuple):
    """Which unmasked tokens each channel trains, [tokens]; None where no reference came."""

    policy: Tensor
    hint: Tensor | None
    replay: Tensor | None


FIRST_STEP = 16  # sequences that a global batch has at least, so that the policy has not moved yet
EVERY = 64  # of the later sequences one is measured: the loss is called for each
IN_PART = Finding(
    "warning",
    "ref_logprobs",
    f"{values.RUN} or more neighbouring tokens have 0.0, which is probability 1, next to others that have a "
    "reference, and PRIME-RL writes 0.0 where a part of a branch was not stamped",
    "stamp every node of a branch, and call stamps.check_trace(trace) in finalize",
)


class ChannelsLoss:
    """The loss of these channels as a function of LossInputs. The first call checks them."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.config = asked, asked.config
        self.hint = hint_choice(asked.config)
        # The ratio of trainer to rollout is logged for every policy, without "policy/".
        self.reported = ("ratio",) if "rollout_logprobs" in asked.choice.loss.needs else ()
        self.is_checked = False
        hint = bool(asked.config.hint_weight) or asked.learns_from_reference
        expects = {"expects hint": float(hint), "expects replay": float(bool(asked.config.replay_weight))}
        # None where no channel reads the reference, which PRIME-RL may then fill as it likes.
        self.positive = Flags() if any(expects.values()) else None
        self.in_part = Flags() if any(expects.values()) else None
        self.differing = Flags() if asked.choice.loss.per_sequence else None
        self.health = Health.of(asked.config, asked.choice, "prime-rl", "token-sum", every=EVERY)
        self.health.facts |= expects

    def __call__(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over the unmasked tokens of one sequence, and its metrics."""
        s = upstream.streams(inputs)
        if not self.is_checked:  # the first inputs, closely
            enforce(newer_than_tested(upstream.check_release(inputs)))
            upstream.check_logprobs(s)
            self.is_checked = True
        reference, positive = s.reference, self.positive
        if positive and reference is not None and positive.any(values.is_no_logprob(reference, s.mask)):
            raise positive_logprob("ref_logprobs", "a positive number")
        masks = _masks(s)
        in_part, is_long = self.in_part, s.mask.shape[-1] >= values.RUN
        if in_part and is_long and reference is not None and masks.hint is not None:
            has_gap = values.is_stamped_in_part(reference, masks.hint)
            if in_part.any(has_gap):
                enforce([IN_PART])
                self.in_part = None
        if self.differing and self.differing.any(differ_by_token(s.advantages, masks.policy)):
            raise differing_advantages(self.asked.choice.loss)
        (policy, value), hint, config = self._policy(s, masks), self._hint(s, masks), self.config
        replay = None
        if config.replay_weight and masks.replay is not None and s.weights is not None:
            replay = -keep(at_least_float32(s.logprobs), masks.replay)
        total = composer(
            value,
            None if hint is None else _sum(hint.loss, s),
            None if replay is None else _sum(replay, s),
            policy_weight=config.policy_weight,
            hint_weight=config.hint_weight,
            replay_weight=config.replay_weight,
        )
        return total, self._metrics(s, masks, policy, hint, replay)

    def _policy(self, s: upstream.Streams, masks: Masks) -> tuple[TokenLoss, Tensor]:
        """The policy loss per token and its sum. One that learns from a reference trains tokens with one."""
        logprobs, is_current = s.logprobs.detach(), self.config.old_policy == "current"
        given: dict[str, Any] = {
            "logprobs": s.logprobs,
            "rollout_logprobs": s.rollout_logprobs,
            "old_logprobs": logprobs if is_current else s.rollout_logprobs,
            "advantages": self._advantages(s, masks),
            "mask": masks.policy,
        }
        if self.asked.learns_from_reference:
            reference = logprobs if s.reference is None else s.reference
            hinted = torch.zeros_like(s.mask) if masks.hint is None else masks.hint
            given |= {"teacher_logprobs": reference, "ref_logprobs": reference, "mask": hinted}
        token = policy_term(self.asked.choice, given, self.asked.correction, masks.policy)
        if s.reference is not None:
            stamps = {"teacher_logprobs": s.reference, "hint_mask": masks.hint, "replay_mask": masks.replay}
            given |= stamps | {"mask": masks.policy}
        is_plain = s.weights is None and self.asked.correction is None
        value = _sum(token.loss, s)
        # Its metrics are those that PRIME-RL logs already.
        self.health.micro_batch(given, token.metrics, rows=FIRST_STEP, loss=value if is_plain else None)
        return token, value

    def _advantages(self, s: upstream.Streams, masks: Masks) -> Tensor:
        """With hint_estimator "advantage", A + hint_weight (log T - log pi)."""
        if self.config.hint_estimator != "advantage" or s.reference is None or masks.hint is None:
            return s.advantages
        return hinted_advantages(s.advantages, s.logprobs, s.reference, masks.hint, self.config.hint_weight)

    def _hint(self, s: upstream.Streams, masks: Masks) -> TokenLoss | None:
        """The divergence from the reference on the sampled tokens, each weighted by trainer / rollout.

        The rollout policy sampled them: without that weight the estimate would be of a KL to an older policy.
        """
        if self.hint is None or masks.hint is None:
            return None
        given = {"student_logprobs": s.logprobs, "teacher_logprobs": s.reference, "mask": masks.hint}
        token: TokenLoss = call(self.hint, given | {"old_logprobs": s.rollout_logprobs})
        return token

    def _metrics(
        self,
        s: upstream.Streams,
        masks: Masks,
        policy: TokenLoss,
        hint: TokenLoss | None,
        replay: Tensor | None,
    ) -> dict[str, Tensor]:
        """The metrics, whose keys are the same with and without a reference."""
        averages = Averages(masks.policy)
        averages.mean("policy/loss", policy.loss.detach(), "policy")
        gap = weighted = None
        if s.reference is not None and masks.hint is not None:
            gap = keep(s.logprobs.detach() - s.reference, masks.hint)
            averages.masks["all"] = s.mask
        if replay is not None and s.weights is not None and masks.replay is not None:
            weighted = keep(replay.detach() * s.weights, masks.replay)
        averages.fraction("hint/token_frac", masks.hint, "all")
        averages.fraction("replay/token_frac", masks.replay, "all")
        averages.mean("hint/kl", gap, "hint/token_frac")
        averages.mean("hint/loss", None if hint is None else hint.loss.detach(), "hint/token_frac")
        averages.mean("replay/loss", weighted, "replay/token_frac")
        kl, excess = averages.mismatch(s.logprobs, s.rollout_logprobs)
        sides = averages.trust_region(policy.metrics, kl)
        averages.of_kernel(policy.metrics, (*sides, *self.reported))
        return averages.computed(excess)


def _masks(s: upstream.Streams) -> Masks:
    if s.reference is None:
        return Masks(s.mask, None, None)
    replay = s.mask & values.is_replay(s.reference)
    policy = s.mask ^ replay
    return Masks(policy, policy & values.has_reference(s.reference, policy), replay)


def _sum(token_loss: Tensor, s: upstream.Streams) -> Tensor:
    """The sum over unmasked tokens, each times its weight: PRIME-RL's trainer divides.

    A kernel's loss is exactly 0 where masked, and a weight there may be anything.
    """
    return token_loss.sum() if s.weights is None else aggregate(token_loss * s.weights, s.mask, "token-sum")
