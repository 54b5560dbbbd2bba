"""The three channels on one sequence of PRIME-RL's: what each adds to the sum, and to the metrics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters.prime_rl_parts import metrics as watched
from composer_plugins.adapters.prime_rl_parts.config import Channels
from composer_plugins.adapters.prime_rl_parts.first_look import check_fields, check_tensors
from composer_plugins.adapters.prime_rl_parts.signals import has_reference, is_replay
from composer_plugins.catalogue import Choice
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.composer import composer
from composer_plugins.kernels.contract import TokenLoss
from composer_plugins.kernels.corrections import corrected
from composer_plugins.kernels.masking import at_least_float32, keep


class Sequence(NamedTuple):
    """PRIME-RL's LossInputs in the catalogue's words, one packed sequence, [tokens] each."""

    logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    reference: Tensor | None
    weights: Tensor | None
    mask: Tensor  # all live tokens
    live: Tensor  # of them those that are no replayed pair's
    hinted: Tensor | None  # of those the ones with a reference; None where no reference came


class ChannelsLoss:
    """The loss of these channels as a function of LossInputs, of which it looks at the first closely."""

    def __init__(self, channels: Channels) -> None:
        self.channels, self.config = channels, channels.config
        self.by_advantage = channels.config.hint_estimator == "advantage"
        needs = channels.policy.loss.needs
        self.learns = not {"teacher_logprobs", "ref_logprobs"}.isdisjoint(needs)
        self.kernel = channels.policy.loss.kernel()
        self.told = {side for sides in watched.SIDES for side in sides}
        if "rollout_logprobs" in needs:
            self.told.add("ratio")  # of trainer to rollout, which is watched for every policy
        self.seen: set[tuple[bool, bool]] = set()  # with a reference or not, with weights or not

    def __call__(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum over the live tokens of one sequence, and its metrics."""
        reference, weights = _reference(inputs), getattr(inputs, "loss_weights", None)
        if (kind := (reference is None, weights is None)) not in self.seen:
            check_fields(self.channels, inputs)
            check_tensors(inputs, reference, weights)
            self.seen.add(kind)
        s = _sequence(inputs, reference, weights)
        hint = None
        if self.channels.hint is not None and s.reference is not None and not self.by_advantage:
            hint = _hint(self.channels.hint, s)
        policy, config = self._policy(s), self.config
        replay = None
        if config.replay_weight and s.reference is not None and s.weights is not None:
            replay = -keep(at_least_float32(s.logprobs), s.mask & ~s.live)
        total = composer(
            _sum(policy.loss, s),
            None if hint is None else _sum(hint.loss, s),
            None if replay is None else _sum(replay, s),
            policy_weight=config.policy_weight,
            hint_weight=config.hint_weight,
            replay_weight=config.replay_weight,
        )
        return total, self._metrics(s, policy, hint, replay)

    def _policy(self, s: Sequence) -> TokenLoss:
        """The policy loss; one that learns from a reference counts the tokens that have one."""
        choice, current = self.channels.policy, self.config.anchor == "current"
        given = {
            "logprobs": s.logprobs,
            "rollout_logprobs": s.rollout_logprobs,
            "old_logprobs": s.logprobs.detach() if current else s.rollout_logprobs,
            "advantages": _with_hint(s, self.config.hint_weight) if self.by_advantage else s.advantages,
            "mask": s.live,
        }
        if self.learns:
            reference = s.logprobs.detach() if s.reference is None else s.reference
            hinted = torch.zeros_like(s.mask) if s.hinted is None else s.hinted
            given |= {"teacher_logprobs": reference, "ref_logprobs": reference, "mask": hinted}
        optional = {name: given[name] for name in choice.takes}
        token: TokenLoss = self.kernel(*[given[n] for n in choice.loss.needs], **optional, **choice.params)
        if self.channels.mismatch is not None:
            correction = self.channels.mismatch
            pair = (s.logprobs.detach(), s.rollout_logprobs)
            token = corrected(token, correction.loss.kernel()(*pair, s.live, **correction.params), s.live)
        return token

    def _metrics(
        self, s: Sequence, policy: TokenLoss, hint: TokenLoss | None, replay: Tensor | None
    ) -> dict[str, Tensor]:
        seen = watched.Watched(s.live)
        seen.mean("policy_loss", policy.loss.detach(), "live")
        _watch_reference(seen, s, hint, replay)
        kl, excess = watched.mismatch(seen, s.logprobs, s.rollout_logprobs, s.live)
        watched.region(seen, policy.metrics, kl, s.live)
        watched.kernel(seen, policy.metrics, self.told)
        return seen.averaged(excess)


def _hint(choice: Choice, s: Sequence) -> TokenLoss:
    """The divergence from the reference on the sampled tokens, each weighed by trainer / rollout.

    The tokens are the rollout policy's; unweighted, the estimate would be of a KL to an older policy.
    """
    given = {
        "student_logprobs": s.logprobs,
        "teacher_logprobs": s.reference,
        "old_logprobs": s.rollout_logprobs,
        "mask": s.hinted,
    }
    optional = {name: given[name] for name in choice.loss.optional if name in given}
    needs = (given[name] for name in choice.loss.needs)
    token: TokenLoss = choice.loss.kernel()(*needs, **optional, **choice.params)
    return token


def _with_hint(s: Sequence, weight: float) -> Tensor:
    """A + hint_weight (log T - log pi): PRIME-RL v0.4's and v0.5's teacher_tau."""
    if s.reference is None or s.hinted is None:
        return s.advantages
    gap = at_least_float32(s.reference) - at_least_float32(s.logprobs).detach()
    return s.advantages + weight * keep(gap, s.hinted)


def _sum(token_loss: Tensor, s: Sequence) -> Tensor:
    """The sum over live tokens, each times its weight: PRIME-RL's trainer divides.

    A kernel's loss is exactly 0 where masked; a weight there may be anything.
    """
    return token_loss.sum() if s.weights is None else aggregate(token_loss * s.weights, s.mask, "token-sum")


def _watch_reference(
    seen: watched.Watched, s: Sequence, hint: TokenLoss | None, replay: Tensor | None
) -> None:
    """The hint and replay metrics, whose keys are there with and without a reference."""
    gap = replayed = None
    if s.reference is not None and s.hinted is not None:
        gap, replayed = keep(s.logprobs.detach() - s.reference, s.hinted), s.mask & ~s.live
        seen.masks["all"] = s.mask
    seen.fraction("reference_fraction", s.hinted, "all")
    seen.fraction("replay_fraction", replayed, "all")
    seen.mean("hint_kl", gap, "reference_fraction")
    seen.mean("hint_loss", None if hint is None else hint.loss.detach(), "reference_fraction")
    weighted = None
    if replay is not None and s.weights is not None:
        weighted = keep(replay.detach() * s.weights, s.mask & ~s.live)
    seen.mean("replay_loss", weighted, "replay_fraction")


def _sequence(inputs: Any, reference: Tensor | None, weights: Tensor | None) -> Sequence:
    mask = inputs.loss_mask
    live = mask if reference is None else mask & ~is_replay(reference)
    hinted = None if reference is None else live & has_reference(reference, live)
    return Sequence(
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.advantages,
        reference,
        weights,
        mask,
        live,
        hinted,
    )


def _reference(inputs: Any) -> Tensor | None:
    """`ref_logprobs`, which before v0.7 was called `teacher_logprobs`."""
    reference: Tensor | None = getattr(inputs, "ref_logprobs", getattr(inputs, "teacher_logprobs", None))
    return reference
