"""PRIME-RL: any loss of the catalogue by one line of TOML, with a hint and a replay channel beside it.

    [trainer.loss]
    type = "custom"
    import_path = "composer_plugins.adapters.prime_rl_loss.loss_fn"
    [trainer.loss.kwargs]
    policy = "cispo"
    anchor = "rollout"

PRIME-RL calls the function once per sequence of a packed micro-batch, adds up the losses and divides by
its own count (v0.6 and later: live tokens of the global batch), so that a SUM comes back and the result
is "token-mean", whatever denominator a loss's paper has. prime_rl itself is never imported: `inputs` is
any object with the fields of its LossInputs, v0.4 to today.

- `ref_logprobs` (before v0.7 `teacher_logprobs`) are the hint's teacher. Packing fills 0.0 where a
  neighbour has a reference and this sequence none, so 0.0 at every live token counts as none.
- `loss_weights` multiply everything, as PRIME-RL's own losses have it.
- Metrics are 0-dimensional float32, the same keys at every call, 0 where there is nothing to average.
"""

from typing import Any, NamedTuple

from torch import Tensor

from composer_plugins.adapters.prime_rl_parts.channels import ChannelsLoss
from composer_plugins.adapters.prime_rl_parts.config import NAMED, TABLE, parse
from composer_plugins.adapters.prime_rl_parts.versions import installed
from composer_plugins.errors import ConfigError


class LossOutputs(NamedTuple):
    """PRIME-RL reads these two names."""

    loss: Tensor
    metrics: dict[str, Tensor]


def loss_fn(inputs: Any, **kwargs: Any) -> LossOutputs:
    """policy_weight * policy + hint_weight * hint + replay_weight * replay, summed over live tokens.

    `kwargs` are `ComposerConfig`'s keys: `policy` (a loss or dialect; default "dppo_tv@prime-rl") with
    `policy_params`, `anchor` ("rollout" or "current": what stands in for old_logprobs), `mismatch` ("tis",
    "mis", "icepop") with `mismatch_params`, `hint_weight` with `hint_estimator` ("score", "k2", "k3", or
    "advantage": part of the advantages), `replay_weight`. Nested tables are dicts.
    Raises ConfigError, at the first call, for what is unknown or what this PRIME-RL cannot carry.
    """
    return LossOutputs(*_built(kwargs)(inputs))


def dppo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """DPPO-Binary-TV with Kimi's drift term: "dppo_tv@prime-rl", the default of v0.6.0 to August 2026."""
    return _named("dppo", inputs, kwargs)


def ipo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """INTELLECT policy optimisation: "ipo@prime-rl", as @559b447 has it (0.1, 1e-3)."""
    return _named("ipo", inputs, kwargs)


def grpo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """PPO's clip around the rollout policy: "grpo" (clip 0.2 and 0.2) with anchor "rollout"."""
    return _named("grpo", inputs, kwargs)


def dapo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """The same with the higher upper clip: "dapo" (0.2 and 0.28) with anchor "rollout"."""
    return _named("dapo", inputs, kwargs)


def gspo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """One ratio per sequence, clipped around the rollout policy: "gspo" with anchor "rollout"."""
    return _named("gspo", inputs, kwargs)


def cispo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """The clipped ratio as a weight, none of its tokens lost: "cispo" with anchor "rollout"."""
    return _named("cispo", inputs, kwargs)


def sapo(inputs: Any, **kwargs: Any) -> LossOutputs:
    """A soft gate in place of the clip: "sapo" with anchor "rollout"."""
    return _named("sapo", inputs, kwargs)


def tis(inputs: Any, **kwargs: Any) -> LossOutputs:
    """REINFORCE with truncated importance sampling: "reinforce" with mismatch "tis" (cap 2)."""
    return _named("tis", inputs, kwargs)


def icepop(inputs: Any, **kwargs: Any) -> LossOutputs:
    """REINFORCE on the tokens whose trainer and rollout agree: "reinforce" with mismatch "icepop"."""
    return _named("icepop", inputs, kwargs)


_losses: dict[str, ChannelsLoss] = {}


def _built(kwargs: dict[str, Any]) -> ChannelsLoss:
    """The loss of these kwargs, parsed once: PRIME-RL passes the same ones at every call."""
    key = repr(sorted(kwargs.items()))  # which tells True from 1, as a hash would not
    if key not in _losses:
        _losses[key] = ChannelsLoss(parse(kwargs, installed()))
    return _losses[key]


def _named(name: str, inputs: Any, kwargs: dict[str, Any]) -> LossOutputs:
    if twice := NAMED[name].keys() & kwargs.keys():
        raise ConfigError(
            f"[{TABLE}] {', '.join(sorted(twice))}: {name} has chosen already, {NAMED[name]}; point "
            "import_path at loss_fn to choose"
        )
    return loss_fn(inputs, **NAMED[name], **kwargs)
