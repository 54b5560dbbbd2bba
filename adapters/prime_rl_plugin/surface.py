"""`[trainer.loss.kwargs]` parsed and checked, and what of it this PRIME-RL cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, scaled_hint, unlikely
from composer_plugins.findings import Finding, Findings, enforce, error_of
from composer_plugins.frameworks.prime_rl import (
    COMMIT,
    DECIDED_ELSEWHERE,
    DEFAULT_POLICY,
    GLOBAL_TOKENS,
    MODE,
    NEWEST_TESTED,
    PRIME_RL,
)
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


class Channels(channels.Channels):
    """What `[trainer.loss.kwargs]` asks for, checked."""

    @property
    def stamped(self) -> tuple[str, str]:
        """What asks for stamps of hints and of pairs, "hint_weight = 0.1"; "" where nothing does."""
        hint, replay = self.config.hint_weight, self.config.replay_weight
        by_policy = f"policy = {self.policy.name!r}" if self.learns_from_reference else ""
        return (
            f"hint_weight = {hint:g}" if hint else by_policy,
            f"replay_weight = {replay:g}" if replay else "",
        )


def parse(kwargs: Mapping[str, Any], function: str = "loss_fn", key: str = TABLE) -> Channels:
    """The channels that these kwargs of one of our functions ask for, or one ConfigError below `key`."""
    found = Findings()
    with found.collected(key):
        return _parse(kwargs, function)
    raise error_of(found)


def _parse(kwargs: Mapping[str, Any], function: str) -> Channels:
    fixed = PRESETS[function].options if function in PRESETS else {}
    wrong = Findings(_chosen_already(function, fixed, kwargs))
    rest = {name: x for name, x in kwargs.items() if name not in {one.key for one in wrong}}
    with wrong.collected():
        config = ComposerConfig.parse({**DEFAULTS, **fixed, **rest})
    enforce(wrong)
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
            f"it is newer than the newest that was tested, {NEWEST_TESTED} (commit {COMMIT})",
            "compare its first steps with a run of its own loss, or install a tested version",
        )
