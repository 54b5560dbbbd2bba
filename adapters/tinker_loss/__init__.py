"""Tinker: any loss of the catalogue for `forward_backward_custom`, with a hint and a replay channel.

    loss = loss_fn(policy="cispo", hint_weight=0.1, replay_weight=0.5)
    training_client.forward_backward_custom(data, loss).result()

`custom_loss` is a policy loss for `ServiceClient.create_custom_loss`. `add_advantages`,
`add_teacher_logprobs`, `add_ref_logprobs` and `mark_pairs` fill `loss_fn_inputs`. The user's page is
docs/tinker.md.
"""

from typing import Any

from composer_plugins.adapters.tinker_loss.loss import Loss
from composer_plugins.adapters.tinker_loss.options import DEFAULT_POLICY, parse
from composer_plugins.adapters.tinker_loss.rollouts import (
    add_advantages,
    add_ref_logprobs,
    add_teacher_logprobs,
    mark_pairs,
)
from composer_plugins.adapters.tinker_loss.traced import custom_loss
from composer_plugins.adapters.tinker_loss.upstream import inputs_apart

__all__ = [
    "add_advantages",
    "add_ref_logprobs",
    "add_teacher_logprobs",
    "custom_loss",
    "inputs_apart",
    "loss_fn",
    "mark_pairs",
]


def loss_fn(policy: str = DEFAULT_POLICY, **options: Any) -> Loss:
    """policy_weight * policy + hint_weight * hint + replay_weight * replay, for `forward_backward_custom`.

    `options` are fields of `ComposerConfig`: `policy` (a loss, a dialect, an import path; by default "grpo")
    with `policy_params`, `old_policy`, `rollout_correction`, `hint_weight` with `hint_estimator`,
    `replay_weight` with `replay_loss`; and the fields of `options.Options`: `denominator`, `max_length`,
    `calls_per_step`, `entries`. They are parsed here, once.

    The function takes (data, logprobs), the log-probabilities of every datum, [its tokens], and returns the
    loss [] and its metrics. The policy is divided by the counts of the step: the counts of the call, or with
    `calls_per_step` the counts that `Loss.of_step` got. A hint is a mean over the step's tokens with a hint,
    a replay a mean over its pairs.
    Raises ConfigError for a wrong option, and DataError at the call for data that cannot be right:
    `Loss.count` raises it before the SDK sends anything.
    """
    return Loss(parse({"policy": policy, **options}))
