"""PRIME-RL's `[trainer.loss.kwargs]` as the one config, and what of it PRIME-RL cannot deliver."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_parts.versions import runs_no_teacher_beside_rl
from composer_plugins.bundled.adapters import PRIME_RL
from composer_plugins.catalogue import Choice
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError

TABLE = "trainer.loss.kwargs"
DEFAULTS = {"policy": "dppo_tv@prime-rl", "hint_divergence": "sampled_token"}
HINT_OPTIONS = {"hint_divergence", "hint_estimator", "hint_params"}
# The functions of `prime_rl_loss` that have chosen already, and what.
NAMED: dict[str, dict[str, str]] = {
    "dppo": {"policy": "dppo_tv@prime-rl"},
    "ipo": {"policy": "ipo@prime-rl"},
    "grpo": {"policy": "grpo", "anchor": "rollout"},
    "dapo": {"policy": "dapo", "anchor": "rollout"},
    "gspo": {"policy": "gspo", "anchor": "rollout"},
    "cispo": {"policy": "cispo", "anchor": "rollout"},
    "sapo": {"policy": "sapo", "anchor": "rollout"},
    "tis": {"policy": "reinforce", "mismatch": "tis"},
    "icepop": {"policy": "reinforce", "mismatch": "icepop"},
}

# Options of other frameworks, each decided elsewhere here.
DECIDED_ELSEWHERE = {
    "advantage": "PRIME-RL's algorithm computes the advantages ([orchestrator.algo])",
    "advantage_params": "PRIME-RL's algorithm computes the advantages ([orchestrator.algo])",
    "hint_teacher": "the teacher is whoever computed the reference log-probabilities",
    "hint_ema_rate": "the teacher is whoever computed the reference log-probabilities",
    "hint_top_k": "PRIME-RL hands over the sampled token's log-probability alone",
    "hint_t_start": "TAID compares distributions, and PRIME-RL hands over the sampled token alone",
    "teacher_prompt_template": "the hint was in the prompt under which the reference was computed",
    "replay_loss": "a pair's coefficient, DPO's, is computed by prime_rl_stamps.stamp_replay_pair",
    "replay_params": "a pair's coefficient is computed by prime_rl_stamps.stamp_replay_pair: beta goes there",
}


class Channels(NamedTuple):
    """What `[trainer.loss.kwargs]` asks for, checked."""

    config: ComposerConfig
    policy: Choice
    mismatch: Choice | None
    hint: Choice | None


def parse(kwargs: Mapping[str, Any], release: str | None = None) -> Channels:
    """`kwargs` as channels that this release of PRIME-RL can carry, or one ConfigError that names the key.

    `release` is a version ("0.6.0"); None where PRIME-RL is not installed, and then its contract decides.
    """
    try:
        return _parse(kwargs, release)
    except ConfigError as error:
        raise ConfigError(f"[{TABLE}] {error}") from None


def _parse(kwargs: Mapping[str, Any], release: str | None) -> Channels:
    for key, reason in DECIDED_ELSEWHERE.items():
        if key in kwargs:
            raise ConfigError(f"{key} is not decided in the loss: {reason}; remove it")
    config = ComposerConfig.parse(DEFAULTS | dict(kwargs))
    if not config.hint_weight and (idle := sorted(HINT_OPTIONS & kwargs.keys())):
        raise ConfigError(
            f"{', '.join(idle)} without a hint_weight: no hint is learned; set it, or remove them"
        )
    if config.hint_estimator == "advantage" and config.hint_params:
        raise ConfigError(
            "hint_params belong to a divergence, and hint_estimator = 'advantage' computes none"
        )
    policy, mismatch = config.choose_policy(), config.choose_mismatch()
    hint = config.choose_hint() if config.hint_weight else None
    for choice in (policy, hint):
        _refuse_what_prime_rl_cannot_feed(choice)
    _check_anchor(config, policy)
    if mismatch is not None:
        _check_mismatch(config, policy, mismatch)
    if hint is not None and runs_no_teacher_beside_rl(release):
        raise ConfigError(
            "hint_weight > 0, and PRIME-RL 0.6 lets no teacher run beside RL: nothing fills "
            "teacher_logprobs. Use 0.5 (orchestrator.teacher_model), or 0.7 and later "
            "(prime_rl_stamps, prime_rl_echo)"
        )
    if config.hint_estimator == "advantage" and policy.loss.name in {"opd", "ref_kl", "iw_opd"}:
        raise ConfigError(
            f"hint_estimator='advantage', and policy {policy.loss.name!r} has the hint for credit"
        )
    return Channels(config, policy, mismatch, hint)


def _refuse_what_prime_rl_cannot_feed(choice: Choice | None) -> None:
    if choice is None:
        return
    name = f"{choice.loss.kind} {choice.loss.name!r}"
    if choice.loss.over_batch or choice.params.get("normalise"):
        raise ConfigError(
            f"{name} is a statistic of the whole batch, and PRIME-RL hands over one sequence at a time"
        )
    if missing := PRIME_RL.missing(choice.loss):
        sampled = ": of a token only the sampled one's log-probability; hint_divergence = 'sampled_token'"
        remedy = (
            sampled if choice.loss.kind == "divergence" else ": composer-plugins list --framework prime-rl"
        )
        raise ConfigError(f"{name} needs {', '.join(missing)}, which PRIME-RL does not hand over{remedy}")


def _check_anchor(config: ComposerConfig, policy: Choice) -> None:
    needs_anchor = "old_logprobs" in policy.loss.needs
    if needs_anchor and config.anchor is None:
        raise ConfigError(
            f"policy {policy.loss.name!r} needs old_logprobs, and PRIME-RL keeps only the rollout engine's: "
            "set anchor = 'rollout' to measure its ratio from those, or anchor = 'current' for a ratio of 1 "
            "(and a mismatch to weigh the rollout's age)"
        )
    if config.anchor is not None and not needs_anchor:
        raise ConfigError(
            f"anchor = {config.anchor!r}, and policy {policy.loss.name!r} takes no old_logprobs: remove it"
        )


def _check_mismatch(config: ComposerConfig, policy: Choice, mismatch: Choice) -> None:
    if "rollout_logprobs" in policy.loss.needs or config.anchor == "rollout":
        raise ConfigError(
            f"mismatch = {mismatch.loss.name!r} weighs a token by trainer / rollout, which is the ratio of "
            f"policy {policy.loss.name!r} already: it would count twice. Remove it, or use it with "
            "policy = 'reinforce' or with anchor = 'current'"
        )
    _refuse_what_prime_rl_cannot_feed(mismatch)
