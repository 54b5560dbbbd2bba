"""PRIME-RL: any loss of the catalogue, with a hint channel and a replay channel.

    [trainer.loss]
    type = "custom"
    import_path = "composer_plugins.adapters.prime_rl_plugin.loss_fn"
    [trainer.loss.kwargs]
    policy = "cispo"
    old_policy = "rollout"

PRIME-RL calls `loss_fn` once per sequence of a packed micro-batch, adds
up the results and divides them by a count of its own. The function therefore returns a sum over tokens.

`stamps` brings hints and pairs to the loss, as recipes/prime_rl does from a store. `upstream` has what
the adapter relies on in PRIME-RL, v0.8.0 to @559b447. The user's page is docs/prime_rl.md.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from composer_plugins.adapters.prime_rl_plugin.options import parse
from composer_plugins.errors import enforce

if TYPE_CHECKING:  # the store and the doctor import this package without torch
    from torch import Tensor

    from composer_plugins.adapters.prime_rl_plugin.loss import ChannelsLoss


class LossOutputs(NamedTuple):
    """What PRIME-RL reads of a result, by these two names."""

    loss: "Tensor"
    metrics: "dict[str, Tensor]"


def loss_fn(inputs: Any, **kwargs: Any) -> LossOutputs:
    """policy_weight * policy + hint_weight * hint + replay_weight * replay, summed over unmasked tokens.

    `kwargs` are the keys of `ComposerConfig`: `policy` (a loss, a dialect or an import path; by default
    "dppo_tv@prime-rl") with `policy_params`, `old_policy` ("rollout" or "current": whose log-probabilities
    are used for old_logprobs), `rollout_correction` ("tis", "mis", "icepop") with
    `rollout_correction_params`, `hint_weight` with `hint_estimator` ("score", "k2", "k3", or "advantage": a
    part of the advantages), `replay_weight`.
    PRIME-RL divides the pairs' sum by the tokens of the global batch too. For DPO's mean over pairs, set
    `replay_weight` to tokens / pairs of a typical batch.
    The first call raises ConfigError for an unknown option, and for what this PRIME-RL cannot run. PRIME-RL's
    `loss_weights` multiply every term. Metrics are 0-dimensional float32, with the same keys at every call.
    """
    return LossOutputs(*_built(kwargs)(inputs))


_losses: "dict[str, ChannelsLoss]" = {}


def _built(kwargs: dict[str, Any]) -> "ChannelsLoss":
    """The loss of these kwargs, parsed once: PRIME-RL passes the same ones at every call."""
    key = repr(sorted(kwargs.items()))  # which distinguishes True from 1, as a hash would not
    if key not in _losses:
        from composer_plugins.adapters.prime_rl_plugin.loss import ChannelsLoss

        asked, found = parse(kwargs)
        enforce(found)
        assert asked is not None
        _losses[key] = ChannelsLoss(asked)
    return _losses[key]
