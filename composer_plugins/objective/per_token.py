"""The loss per token of an `Objective`: policy, rollout correction, KL and entropy, for a loss of an adapter.

An adapter in whose framework our loss is the only term (NeMo-RL, slime) adds every term here. The adapter
divides.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.config import ComposerConfig
from composer_plugins.kernels.entropy import entropy_bonus
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.calling import call, check_inputs
from composer_plugins.losses.choosing import Choice
from composer_plugins.objective.objective import Behaviour, Objective
from composer_plugins.objective.terms import hint_choice, hinted_advantages, policy_term


class Terms(NamedTuple):
    """What is added up per token, by the options that set it."""

    objective: Objective
    policy_weight: float = 1.0
    hint: Choice | None = None  # a divergence of the sampled token, as a term of its own
    hint_weight: float = 0.0
    hint_in_advantages: Choice | None = None  # the divergence whose estimate is added to the advantages

    @classmethod
    def of(cls, objective: Objective, config: ComposerConfig) -> "Terms":
        """The terms of our config, and what else the framework's own options ask for."""
        weight = config.hint_weight
        in_advantages = config.choose_hint() if weight and config.hint_estimator == "advantage" else None
        return cls(objective, config.policy_weight, hint_choice(config), weight, in_advantages)

    @property
    def reads_teacher(self) -> bool:
        """Whether a term needs the teacher's log-probabilities."""
        return self.hint is not None or self.hint_in_advantages is not None

    @property
    def reads_reference(self) -> bool:
        """Whether a term needs the reference policy's log-probabilities."""
        policy, kl = self.objective.policy.loss, self.objective.kl
        return "ref_logprobs" in policy.needs or (kl is not None and kl.place == "loss")


def per_token(terms: Terms, given: Mapping[str, Tensor], *, check: bool = False) -> TokenLoss:
    """Return the sum of all terms at each token, exactly 0 where the mask is False, with their metrics.

        x_t = policy_weight w_t policy_t + kl_weight kl_t - entropy_coef H_t + hint_weight hint_t

    `given` has tensors by their names in `losses.inputs.INPUTS`: "logprobs", "advantages", "mask", and of
    "old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs" and "entropies" those that a term
    needs. They are of the shape [rows, tokens]. `check` looks at their types and values: for a first batch.
    """
    objective, mask = terms.objective, given["mask"]
    rollout = given.get("rollout_logprobs")
    tensors = {name: x for name, x in given.items() if x is not None}
    tensors["old_logprobs"] = of_behaviour(objective.old or "trainer", given)
    if objective.rollout == "trainer":
        tensors["rollout_logprobs"] = given["old_logprobs"]
    if terms.hint_in_advantages is not None:
        advantages, teacher = tensors["advantages"], given["teacher_logprobs"]
        if check:
            sides = {"student_logprobs": given["logprobs"], "teacher_logprobs": teacher}
            check_inputs(terms.hint_in_advantages, {**sides, "mask": mask})
        tensors["advantages"] = hinted_advantages(
            advantages, given["logprobs"], teacher, mask, terms.hint_weight
        )
    of_trainer = given.get("old_logprobs")
    token = policy_term(objective.policy, tensors, objective.correction, None, of_trainer, check=check)
    loss, metrics = terms.policy_weight * token.loss, dict(token.metrics)
    metrics["policy_loss"] = Metric(token.loss.detach(), mask)
    if objective.kl is not None and objective.kl.place == "loss":
        # Those without the sampler's top-k or top-p, where a framework has them.
        unfiltered = given.get("unfiltered_logprobs", given["logprobs"])
        pair = {**tensors, "logprobs": unfiltered}
        pair["old_logprobs"] = of_behaviour(objective.kl.old, {**given, "logprobs": unfiltered})
        kl: Tensor = call(objective.kl.estimator, pair, check=check)
        loss = loss + objective.kl.weight * kl
        metrics["kl"] = Metric(kl.detach(), mask)
    if objective.entropy:
        loss = loss + entropy_bonus(given["entropies"], mask, weight=objective.entropy).loss
    if terms.hint is not None:
        sides = {"student_logprobs": given["logprobs"], "teacher_logprobs": given["teacher_logprobs"]}
        behaviour = {"old_logprobs": rollout if rollout is not None else given["old_logprobs"]}
        hint: TokenLoss = call(terms.hint, {**sides, **behaviour, "mask": mask}, check=check)
        loss = loss + terms.hint_weight * hint.loss
        metrics["hint_loss"] = Metric(hint.loss.detach(), mask)
    return TokenLoss(loss, metrics)


def of_behaviour(whose: Behaviour, given: Mapping[str, Tensor]) -> Tensor:
    """The log-probabilities that take the place of old_logprobs."""
    if whose == "policy itself":
        return given["logprobs"].detach()
    return given["rollout_logprobs" if whose == "rollout engine" else "old_logprobs"]


def metric_sums(metrics: Mapping[str, Metric], mask: Tensor) -> dict[str, Tensor]:
    """The sum of each metric over its tokens, 0-dimensional and detached: the caller divides."""
    found = {}
    for name, (value, where) in metrics.items():
        value, where = torch.broadcast_tensors(value.detach().to(torch.float32), where & mask)
        found[name] = keep(value, where).sum()
    return found
