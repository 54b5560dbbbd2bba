"""The composer loss: the sum of a policy, a hint and a replay channel."""

from composer_plugins.kernels.types import Scalar


def composer(
    policy: Scalar,
    hint: Scalar | None = None,
    replay: Scalar | None = None,
    *,
    policy_weight: float = 1.0,
    hint_weight: float = 1.0,
    replay_weight: float = 1.0,
) -> Scalar:
    """policy_weight * policy + hint_weight * hint + replay_weight * replay, of reduced channels.

    - policy: a policy loss over verifiable rewards (`policy`, `advantages`).
    - hint: a divergence from the policy conditioned on a hint, the teacher, to the policy without it,
      on the same completion (`divergences`, `taid`). The teacher carries no gradient.
    - replay: a preference loss over replayed traces (`preference`).

    A channel that is None is absent. A channel of weight 1 is not multiplied, so that `composer(policy)`
    is `policy` itself. A channel of weight 0 stays in the graph, and its NaN stays NaN: pass None for a
    channel that should not count. SDPO mixes convexly instead: (1 - w) policy + w hint.
    Source: Cursor, Composer 2.5 (targeted self-distillation beside RL); arXiv 2601.20802 (SDPO).
    """
    total = _weighted(policy, policy_weight)
    if hint is not None:
        total = total + _weighted(hint, hint_weight)
    if replay is not None:
        total = total + _weighted(replay, replay_weight)
    return total


def _weighted(channel: Scalar, weight: float) -> Scalar:
    return channel if weight == 1 else weight * channel
