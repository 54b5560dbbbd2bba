"""`[trainer.loss.kwargs]` parsed and checked, and what of it this PRIME-RL cannot run."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, at, scaled_hint, unlikely
from composer_plugins.errors import ComposerError
from composer_plugins.findings import Finding, Findings, enforce, error_of
from composer_plugins.frameworks.prime_rl import (
    DECIDED_ELSEWHERE,
    DEFAULT_POLICY,
    GLOBAL_TOKENS,
    MODE,
    NEWEST_TESTED,
    PRIME_RL,
)
from composer_plugins.losses.choosing import find_one
from composer_plugins.losses.row import Loss
from composer_plugins.objective import channels
from composer_plugins.objective.rules import sum_over_tokens

MODULE = "composer_plugins.adapters.prime_rl_plugin"
TABLE = "trainer.loss.kwargs"
DEFAULTS = {"policy": DEFAULT_POLICY, "hint_divergence": "sampled_token"}


class Preset(NamedTuple):
    """A function for `import_path` whose options are fixed in part."""

    summary: str
    options: dict[str, str]


ROLLOUT, REINFORCE = {"old_policy": "rollout"}, {"policy": "reinforce"}
PRESETS = {
    "dppo": Preset(
        "DPPO-Binary-TV with Kimi's drift term, PRIME-RL's default.",
        {"policy": "dppo_tv@prime-rl"},
    ),
    "ipo": Preset(
        "IPO as PRIME-RL @559b447 has it (threshold 0.1, kl_tau 1e-3).", {"policy": "ipo@prime-rl"}
    ),
    "grpo": Preset("PPO's clip (0.2 and 0.2) around the rollout policy.", {"policy": "grpo"} | ROLLOUT),
    "dapo": Preset("PPO's clip with a higher upper bound (0.2 and 0.28).", {"policy": "dapo"} | ROLLOUT),
    "gspo": Preset("GSPO: one clipped ratio per sequence.", {"policy": "gspo"} | ROLLOUT),
    "cispo": Preset(
        "CISPO: the clipped ratio is a weight and drops no token.", {"policy": "cispo"} | ROLLOUT
    ),
    "sapo": Preset("SAPO: a soft gate in place of the clip.", {"policy": "sapo"} | ROLLOUT),
    "tis": Preset(
        "REINFORCE with truncated importance sampling (cap 2).", REINFORCE | {"rollout_correction": "tis"}
    ),
    "icepop": Preset(
        "REINFORCE on the tokens for which trainer and rollout engine agree.",
        REINFORCE | {"rollout_correction": "icepop"},
    ),
}


class Requested(NamedTuple):
    """The channels that are asked for: "hint_weight = 0.1", the option that asks; "" if none does."""

    hint: str
    replay: str

    @property
    def any(self) -> str:
        """Both in one phrase, for a message."""
        return " and ".join(filter(None, self))


class Channels(channels.Channels):
    """What `[trainer.loss.kwargs]` asks for, checked."""

    @property
    def requested(self) -> Requested:
        """The channels that need more than advantages."""
        hint, replay = requested(self.config.model_dump())
        by_policy = f"policy {self.policy.name!r}" if self.learns_from_reference else ""
        return Requested(hint or by_policy, replay)


def requested(options: Mapping[str, Any]) -> Requested:
    """The channels by their weights, whatever else may be wrong with the options."""

    def phrase(name: str) -> str:
        value = options.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return f"{name} = {value:g}"
        return ""

    return Requested(phrase("hint_weight"), phrase("replay_weight"))


def parse(kwargs: Mapping[str, Any], function: str = "loss_fn", key: str = TABLE) -> Channels:
    """The channels that these kwargs of one of our functions ask for, or one ConfigError below `key`."""
    found = Findings()
    with found.collected(key):
        return _parse(kwargs, function)
    raise error_of(found)


def _parse(kwargs: Mapping[str, Any], function: str) -> Channels:
    fixed = PRESETS[function].options if function in PRESETS else {}
    defaults = {**DEFAULTS, **fixed}
    wrong, of_config = Findings(_chosen_already(function, fixed, kwargs)), Findings()
    unknown = {name: x for name, x in kwargs.items() if name not in ComposerConfig.model_fields}
    wrong += _explained(unknown, "", defaults, kwargs)
    rest = {name: x for name, x in kwargs.items() if name not in {one.key for one in wrong}}
    with of_config.collected():
        config = ComposerConfig.parse({**defaults, **rest})
    of_params = [one.key for one in of_config if one.key.startswith("policy_params.")]
    refused = {key.partition(".")[2]: at(kwargs, key) for key in of_params}
    wrong += _explained(refused, "policy_params.", defaults, kwargs)
    enforce([*wrong, *of_config])
    chosen, found = channels.chosen(PRIME_RL, config, kwargs)
    enforce([*found, *_contradictions(chosen)])
    return Channels(*chosen)


def _error(key: str, problem: str, remedy: str) -> Finding:
    return Finding("error", key, problem, remedy)


def _contradictions(chosen: channels.Channels) -> Iterator[Finding]:
    """Yield an error for a policy whose old_logprobs nothing stands in for."""
    if chosen.needs_old and chosen.config.old_policy is None:
        problem = f"{chosen.policy.name!r} needs old_logprobs, and PRIME-RL keeps only the rollout engine's"
        remedy = "set old_policy = 'rollout' for a ratio to those, or old_policy = 'current' for a ratio of 1"
        yield _error("policy", problem, remedy)


def _chosen_already(function: str, fixed: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield an error for each option that the function or PRIME-RL decides."""
    for option in kwargs:
        if option in fixed:
            problem = f"the function {function} has chosen {fixed[option]!r} already"
            yield _error(option, problem, f"remove it, or set import_path = {MODULE + '.loss_fn'!r}")
        else:
            yield from channels.decided_elsewhere([option], DECIDED_ELSEWHERE)


def _explained(
    unknown: Mapping[str, Any], above: str, defaults: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield an error for each option of the policy or of PRIME-RL's own losses, with its place here."""
    if not unknown:
        return
    from composer_plugins.adapters.prime_rl_plugin.own_losses import (
        advice,
    )  # which a right config never needs

    chosen = chosen_policy(defaults, kwargs)
    for name, value in unknown.items():
        is_known = above and (chosen is None or name in chosen.parameters)
        if not is_known and (found := advice(name, value, chosen)):
            yield _error(f"{above}{name}", *found)


def chosen_policy(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Loss | None:
    """The row of the policy that is named, whatever else may be wrong; None for a wrong name."""
    name = kwargs.get("policy", defaults["policy"])
    with suppress(ComposerError):
        return find_one(name.partition("@")[0], "policy").loss if isinstance(name, str) else None
    return None


def findings(channels: Channels, key: str = TABLE) -> Iterator[Finding]:
    """What is wrong with these channels: for the doctor and for the loss's first call."""
    policy, config = channels.policy, channels.config
    if config.old_policy == "current":
        # A loss that has the rollout's ratio too has other parameters that act on that one.
        has_rollout = "rollout_logprobs" in policy.loss.needs
        names = [name for name in policy.loss.parameters if not has_rollout or name.startswith("clip_")]
        yield Finding(
            "warning",
            f"{key}.old_policy",
            f"it is 'current', so the ratio of {policy.name!r} to the old policy is 1 at every token: "
            f"{', '.join(sorted(names))} cannot limit how far the policy moves",
            "set old_policy = 'rollout' for a ratio to the rollout engine, or policy = 'reinforce' for none",
        )
    yield from (one.under(key) for one in (*unlikely(policy), *scaled_hint(config, policy)))
    if policy.loss.name == "ref_kl" and "tv_high" in config.policy_params and not policy.optional:
        problem = f"it has no effect: it bounds tokens with A > 0, and {policy.name!r} takes no advantages"
        remedy = "remove it, or set policy = 'ref_kl@prime-rl<0.7', which takes them"
        yield Finding("warning", f"{key}.policy_params.tv_high", problem, remedy)
    if config.policy_weight:
        yield from sum_over_tokens(policy, PRIME_RL, MODE, GLOBAL_TOKENS, f"{key}.policy")


def newer_than_tested(is_newer: bool) -> Iterator[Finding]:
    """A warning where PRIME-RL is newer than the newest that was tested."""
    if is_newer:
        yield Finding(
            "warning",
            "prime-rl",
            f"it is newer than the newest that was tested, {NEWEST_TESTED} (commit 559b447)",
            "compare its first steps with a run of its own loss, or install a tested version",
        )
