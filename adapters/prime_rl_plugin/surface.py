"""`[trainer.loss.kwargs]` parsed and checked, and what of it this PRIME-RL cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.findings import Finding, Findings
from composer_plugins.frameworks.prime_rl import (
    COMMIT,
    DEFAULT_POLICY,
    GLOBAL_TOKENS,
    MODE,
    NEWEST_TESTED,
    PRIME_RL,
)
from composer_plugins.objective.asking import Asked, ask
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


def stamped(asked: Asked) -> tuple[str, str]:
    """What asks for stamps of hints and of pairs, "hint_weight = 0.1"; "" where nothing does."""
    hint, replay = asked.config.hint_weight, asked.config.replay_weight
    by_policy = f"policy = {asked.choice.name!r}" if asked.learns_from_reference else ""
    return (
        f"hint_weight = {hint:g}" if hint else by_policy,
        f"replay_weight = {replay:g}" if replay else "",
    )


def parse(
    kwargs: Mapping[str, Any], function: str = "loss_fn", key: str = TABLE
) -> tuple[Asked | None, Findings]:
    """What these kwargs of one of our functions ask for, and what is wrong with them, below `key`."""
    fixed = PRESETS[function].options if function in PRESETS else {}
    found = Findings()
    for option in [one for one in kwargs if one in fixed]:
        problem = f"the function {function} has chosen {fixed[option]!r} already"
        remedy = f"remove it, or set import_path = {MODULE + '.loss_fn'!r}"
        found.append(Finding("error", f"{key}.{option}", problem, remedy))
    rest = {name: x for name, x in kwargs.items() if name not in fixed}
    asked, more = ask(PRIME_RL, rest, defaults={**DEFAULTS, **fixed}, at=key)
    found += more
    if asked is not None:
        found += (one.under(key) for one in _findings(asked))
    return asked, found


def _findings(asked: Asked) -> Iterator[Finding]:
    """Yield what does not fit PRIME-RL, which keeps only the rollout engine's log-probabilities."""
    policy, config = asked.choice, asked.config
    if asked.needs_old and config.old_policy is None:
        problem = f"{policy.name!r} needs old_logprobs, and PRIME-RL keeps only the rollout engine's"
        remedy = "set old_policy = 'rollout' for a ratio to those, or old_policy = 'current' for a ratio of 1"
        yield Finding("error", "policy", problem, remedy)
    if policy.loss.name == "ref_kl" and "tv_high" in config.policy_params and not policy.optional:
        problem = f"it has no effect: it bounds tokens with A > 0, and {policy.name!r} takes no advantages"
        remedy = "remove it, or set policy = 'ref_kl@prime-rl<0.7', which takes them"
        yield Finding("warning", "policy_params.tv_high", problem, remedy)
    if config.policy_weight:
        yield from sum_over_tokens(policy, PRIME_RL, MODE, GLOBAL_TOKENS, "policy")


def newer_than_tested(is_newer: bool) -> Iterator[Finding]:
    """A warning where PRIME-RL is newer than the newest that was tested."""
    if is_newer:
        yield Finding(
            "warning",
            "prime-rl",
            f"it is newer than the newest that was tested, {NEWEST_TESTED} (commit {COMMIT})",
            "compare its first steps with a run of its own loss, or install a tested version",
        )
