"""`[trainer.loss.kwargs]` parsed and checked, and what of it this PRIME-RL cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.errors import Finding, Findings
from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.objective.asking import Asked, ask
from composer_plugins.objective.rules import sum_over_tokens

MODULE = "composer_plugins.adapters.prime_rl_plugin"
FUNCTION = f"{MODULE}.loss_fn"  # the import path
TABLE = "trainer.loss.kwargs"
DEFAULTS = {"policy": prime_rl.DEFAULT_POLICY, "hint_divergence": "sampled_token"}


def parse(kwargs: Mapping[str, Any], key: str = TABLE) -> tuple[Asked | None, Findings]:
    """What these kwargs of `loss_fn` ask for, and what is wrong with them, below `key`."""
    asked, found = ask(PRIME_RL, kwargs, defaults=DEFAULTS, at=key)
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
        yield from sum_over_tokens(policy, PRIME_RL, prime_rl.MODE, prime_rl.GLOBAL_TOKENS, "policy")


def newer_than_tested(is_newer: bool) -> Iterator[Finding]:
    """A warning where PRIME-RL is newer than the newest that was tested."""
    if is_newer:
        newest = f"{prime_rl.NEWEST_TESTED} (commit {prime_rl.COMMIT})"
        problem = f"it is newer than the newest that was tested, {newest}"
        remedy = "compare its first steps with a run of its own loss, or install a tested version"
        yield Finding("warning", "prime-rl", problem, remedy)
