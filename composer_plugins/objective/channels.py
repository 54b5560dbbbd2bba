"""The channels of a loss function that a framework calls with one number per sampled token, checked once."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from composer_plugins.config import ComposerConfig
from composer_plugins.findings import Finding, Findings
from composer_plugins.frameworks.contract import Framework
from composer_plugins.losses.choosing import Choice


class Channels(NamedTuple):
    """What a config asks for, looked up; None for a channel without a weight."""

    config: ComposerConfig
    policy: Choice
    rollout_correction: Choice | None
    hint: Choice | None
    replay: Choice | None = None

    @property
    def learns_from_reference(self) -> bool:
        """Whether the policy loss itself needs the log-probabilities of a reference or of a teacher."""
        return not {"teacher_logprobs", "ref_logprobs"}.isdisjoint(self.policy.loss.needs)

    @property
    def needs_old(self) -> bool:
        """Whether the policy loss needs old_logprobs."""
        return "old_logprobs" in self.policy.loss.needs


def chosen(framework: Framework, config: ComposerConfig, given: Collection[str]) -> tuple[Channels, Findings]:
    """Look up the losses of a config, and find what this framework, or one option with another, cannot do.

    `given` are the options that the user has written.
    Raises ConfigError for a name or a parameter that does not exist.
    """
    policy, correction = config.choose_policy(), config.choose_rollout_correction()
    hint = config.choose_hint() if config.hint_weight else None
    has_pairs = config.replay_weight and "preference" in framework.provides
    replay = config.choose_replay() if has_pairs else None
    channels = Channels(config, policy, correction, hint, replay)
    found = Findings(config.without_effect(given))
    for choice in filter(None, (policy, correction, hint, replay)):
        with found.collected():
            framework.require(choice)
    found += _contradictions(channels)
    return channels, found


def decided_elsewhere(given: Collection[str], table: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Yield an error for each given option that this framework decides; `table` has problem and remedy."""
    for option in given:
        if option in table:
            problem, remedy = table[option]
            yield Finding("error", option, problem, remedy)


def _contradictions(channels: Channels) -> Iterator[Finding]:
    """Yield an error for each option that does not fit the policy."""
    config, policy = channels.config, channels.policy
    if config.old_policy is not None and not channels.needs_old:
        problem = f"policy {policy.name!r} takes no old_logprobs"
        yield Finding("error", "old_policy", problem, "remove it")
    has_ratio = "rollout_logprobs" in policy.loss.needs or config.old_policy == "rollout"
    if channels.rollout_correction is not None and has_ratio:
        problem = f"policy {policy.name!r} has the ratio of trainer to rollout already: it would count twice"
        yield Finding("error", "rollout_correction", problem, "remove it, or use policy = 'reinforce'")
    if config.hint_estimator == "advantage" and channels.learns_from_reference:
        problem = f"policy {policy.name!r} takes no advantages: it learns from the reference itself"
        yield Finding("error", "hint_estimator", problem, "remove it, or choose another policy")
