"""What two objectives differ in, what each difference means, and what the user can set."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.objective.objective import MISSING, Objective

NOT_CARRIED_OVER, TO_CORRECT = "not carried over", "to correct in this config"
# What a bare loss does not say, so that it is not compared.
NOT_OF_A_LOSS = {"advantage", "KL", "rollout correction", "entropy bonus", "temperature"}
NOT_OF_A_LOSS |= {"denominator.max_length"}
# What a policy loss decides, so that it is not compared without a policy loss.
OF_A_POLICY = {"policy", "denominator", "old_logprobs", "rollout_logprobs"}


class Effect(NamedTuple):
    """What it means that a property differs, and what the user can set."""

    meaning: str
    remedy: str = ""
    # The values that act only where numbers are extreme, or as little as rounding; None: no such values.
    small: tuple[float, float] | None = None

    def is_small(self, *values: Any) -> bool:
        """Whether both values of the property are among those that act on extreme numbers only."""
        return self.small is not None and all(
            value is None or self.small[0] <= value <= self.small[1] for value in values
        )


CONSTANT = "Adam ignores a constant factor of the whole loss; for one term of several, change its weight."
# By property, the most important first. The key is a whole name, the last part of one, the first part, or
# the word with which it begins: `effect_of`.
EFFECTS: dict[str, Effect] = {
    TO_CORRECT: Effect("The written config does not run before this is corrected."),
    "policy": Effect("Every token has another loss."),
    "advantage": Effect("Rewards become advantages by another rule, so each completion has another weight."),
    "scale": Effect("The standard deviation that divides the advantages is another one, or there is none."),
    "singleton": Effect(
        "A prompt with a single completion gets another advantage.", "Sample at least two per prompt."
    ),
    "policy_weight": Effect("The policy loss weighs more or less against the other terms."),
    "on_bad_reward": Effect("A reward that is NaN or infinite is treated in another way."),
    "multiplies": Effect("The weight multiplies other terms of the loss."),
    "KL": Effect("The penalty that keeps the policy near the reference policy is another one, or none."),
    "hint": Effect("The hint's term of the loss is another one, or its teacher is."),
    "teacher_prompt_template": Effect("The hint's teacher gets another prompt."),
    "replay": Effect("The loss of the replayed pairs is another one, or there is none."),
    "replay_temperature": Effect(
        "The pairs are compared at another temperature, which scales their margins."
    ),
    "entropy bonus": Effect("The term that keeps the entropy up has another coefficient, or there is none."),
    "rollout correction": Effect(
        "What makes up for the gap between trainer and rollout engine is different."
    ),
    "enters": Effect("The weight of the correction enters the loss in another place."),
    NOT_CARRIED_OVER: Effect(
        "Only one of the two configs does this.", "Set it by hand, if the target has it."
    ),
    "temperature": Effect("Sampling, and the log-probabilities of the loss, have another temperature."),
    "completions per prompt": Effect(
        "A prompt's baseline comes from another number of rewards.", "Set it in the written config."
    ),
    "ddof": Effect("All advantages change by a constant factor, sqrt(n / (n - 1)) for n completions."),
    "denominator": Effect(
        "The sum is divided by another number, so the weight of each token in its completion or batch "
        "changes.",
        CONSTANT,
    ),
    "max_length": Effect("The whole policy loss changes by a constant factor.", CONSTANT),
    "old_logprobs": Effect(
        "The ratio compares the policy with other log-probabilities, and is another number at every token."
    ),
    "rollout_logprobs": Effect("The loss compares the policy with the log-probabilities of another engine."),
    "eps": Effect("It matters only where all rewards of a prompt are nearly equal.", small=(0.0, 1e-3)),
    "log_ratio_clamp": Effect(
        "It matters only at tokens whose log ratio is beyond it.", small=(10.0, math.inf)
    ),
    "value_clamp": Effect("It matters only at tokens whose penalty is beyond it.", small=(5.0, math.inf)),
}


def effect_of(what: str) -> str:
    """The key in EFFECTS of a property: "denominator" for "KL.denominator"."""
    head, _, last = what.partition(".")
    return next(key for key in (what, last, head, head.partition("_")[0]) if key in EFFECTS)


class Difference(NamedTuple):
    """Something that the target's config does otherwise than the source's."""

    what: str
    source: str
    target: str
    is_small: bool = False  # both values act on extreme numbers only

    def __str__(self) -> str:
        return f"{self.what}: {self.source}" + (f" -> {self.target}" if self.target else "")


def differences(source: Objective, target: Objective) -> Iterator[Difference]:
    """Yield what `target` does otherwise than `source`, and what neither can express."""
    ours, theirs = source.facts(), target.facts()
    if source.policy.loss.is_formula_of(target.policy.loss):  # grpo with DAPO's clips is dapo
        theirs["policy"] = ours["policy"]
    skipped = (set() if source.has_terms else NOT_OF_A_LOSS) | (OF_A_POLICY if source.no_policy else set())
    if source.no_policy:
        yield Difference("policy", f"none, because {source.no_policy}", f"{MISSING}, for you to choose")
    if any((one.group_size or 1) > 1 for one in (source, target)):
        skipped |= {"advantage.singleton"}  # what a group of one gets
    for what in dict.fromkeys((*ours, *theirs)):
        head, values = what.partition(".")[0], (ours.get(what), theirs.get(what))
        if values[0] == values[1] or {what, head} & skipped:
            continue
        if ours.get(head) == theirs.get(head):
            is_small = EFFECTS[effect_of(what)].is_small(*values)
            yield Difference(what, _shown(values[0]), _shown(values[1]), is_small)
        elif what == head:  # another loss, with parameters of its own
            yield Difference(what, _described(what, ours), _described(what, theirs))
    for remark in dict.fromkeys((*source.remarks, *target.remarks)):
        if remark not in source.remarks or remark not in target.remarks:
            yield Difference(NOT_CARRIED_OVER, remark, "")


def _described(what: str, facts: Mapping[str, Any]) -> str:
    """A fact with those that belong to it: "k3 (weight 0.001, place loss)"."""
    start = f"{what}."
    more = [
        f"{name.removeprefix(start)} {_shown(value)}"
        for name, value in facts.items()
        if name.startswith(start) and value is not None
    ]
    return _shown(facts.get(what)) + (f" ({', '.join(more)})" if more else "")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).removesuffix(".0" if isinstance(value, float) else "")
