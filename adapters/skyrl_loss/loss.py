"""Policy losses and advantage estimators as SkyRL calls them.

SkyRL pickles a registered function into a Ray actor, from which each worker takes it. So each is an object
with a name for its state, and finds its loss where it is called.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.skyrl_loss.options import asked
from composer_plugins.adapters.skyrl_loss.upstream import PADDING_UID, as_table, corrected, moved
from composer_plugins.errors import ConfigError, enforce, log_info
from composer_plugins.frameworks.skyrl import NODE, SKYRL, Key
from composer_plugins.health.measuring import CHANGED
from composer_plugins.health.watch import OURS, Health, per_token, rollouts
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.calling import call, differ_by_token, differing_advantages
from composer_plugins.losses.masks import boolean_mask, token_weights
from composer_plugins.losses.metrics import means
from composer_plugins.losses.rollouts import batch_tensors, for_advantage
from composer_plugins.losses.row import Kind
from composer_plugins.objective.asking import Asked
from composer_plugins.objective.options import described

log_once = cache(log_info)


class Registered:
    """What is registered as `composer/<name>`, or for "" as `composer`, which reads our options."""

    kind: Kind

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.__name__ = self.__qualname__ = f"composer_{name or self.kind}"
        self._config: Any = None  # what was parsed last
        self._asked: Asked | None = None
        self._is_checked = False  # whether it has had a micro-batch with an unmasked token, which was checked

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.name,)

    def asked(self, config: Any) -> Asked:
        """What SkyRL's AlgorithmConfig asks for."""
        if self._asked is None or self._config != config:
            node = as_table(config)["trainer"]["algorithm"].get("composer") or {}
            found, wrong = asked(node, self.kind, self.name or None, moved(config))
            enforce(wrong)
            assert found is not None
            self._config, self._asked, self._is_checked = deepcopy(config), found, False
            self.health = Health.of(found.config, found.choice, "skyrl", "token-sum")
            log_once(described(SKYRL, found.choice))
        assert self._asked is not None
        return self._asked


class PolicyLoss(Registered):
    """One of our policy losses, in the form that SkyRL's PolicyLossRegistry takes."""

    kind: Kind = "policy"

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the sum over the unmasked tokens, and the metrics as means over them.

        All tensors are [rows, tokens]. The advantages hold the denominator of the mini-batch already, so the
        sums of micro-batches and ranks add up to the mean. SkyRL's own off_policy_correction multiplies the
        loss of each token, and masks tokens out.
        """
        asked_for = self.asked(config)
        choice = asked_for.choice
        weights = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        mask = token_weights("loss_mask", weights, check=not self._is_checked) > 0
        if rollout_logprobs is None and "rollout_logprobs" in choice.loss.needs:
            problem = (
                f"{choice.name!r} compares with the rollout policy, and SkyRL has no log-probabilities of it"
            )
            raise ConfigError(choice.option, problem, f"set {Key.LOGPROBS}=1, or choose another loss")
        tensors = {"logprobs": log_probs, "old_logprobs": old_log_probs, "rollout_logprobs": rollout_logprobs}
        tensors |= {"advantages": advantages, "mask": mask}
        if choice.loss.per_sequence and bool(differ_by_token(advantages, mask)):
            raise differing_advantages(choice.loss)
        token: TokenLoss = call(choice, tensors, check=not self._is_checked)
        self._is_checked = self._is_checked or bool(mask.any())
        loss, weights, more = corrected(token.loss, old_log_probs, rollout_logprobs, weights, config)
        changed = [x for name, x in token.metrics.items() if name.startswith(CHANGED)]
        clipped = sum((x.value.float() * x.where for x in changed), torch.zeros_like(log_probs))
        logged = {"clip_ratio": Metric(clipped.detach(), mask)}
        logged |= {f"composer/policy/{name}": x for name, x in token.metrics.items()}
        value = (loss * weights).sum()
        measured = self.health.micro_batch(tensors, token.metrics, loss=None if more else value)
        logged |= {OURS + name: x for name, x in per_token(measured, mask).items()}
        return asked_for.config.policy_weight * value, means(logged, "") | more


class AdvantageEstimator(Registered):
    """One of our advantages, in the form that SkyRL's AdvantageEstimatorRegistry takes."""

    kind: Kind = "advantage"

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: Any = None,
        values: Tensor | None = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return advantages [rows, tokens], 0 where the mask is 0, and the same tensor as the returns.

        With `values`, for a critic, the returns are the advantages before any whitening, plus the values.
        A reward that is not finite is a DataError, or what `on_bad_reward` says.
        """
        asked_for = self.asked(config)
        choice, mask = asked_for.choice, boolean_mask("response_mask", response_mask, check=True)
        on_bad_reward = asked_for.config.on_bad_reward
        tensors = batch_tensors(token_level_rewards, mask, index, on_bad_reward, padding=PADDING_UID)
        tensors = for_advantage(choice, tensors, mask, f"{NODE}.on_bad_reward", "SkyRL")
        if values is not None:
            tensors["values"] = torch.where(mask, values, 0.0)
        found = call(choice.with_optional(*choice.loss.optional), tensors, check=True)
        if "group_ids" in choice.loss.needs:
            self.health.step("rollouts", rollouts(tensors["rewards"], tensors["group_ids"].tolist()))
        is_per_token = "token_rewards" in choice.loss.needs
        found = torch.where(mask, found if is_per_token else found.unsqueeze(-1), 0.0)
        if values is None or "values" not in choice.loss.needs:
            return found, found
        raw = call(choice, tensors, whiten=False) if "whiten" in choice.loss.parameters else found
        return found, torch.where(mask, raw + tensors["values"], 0.0)
