"""Which option a misspelt one is taken for, and that a name of another framework or release is none."""

import pytest

from composer_plugins.errors import near
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.prime_rl import LOSS_OPTIONS
from composer_plugins.frameworks.registry import counterpart, frameworks
from composer_plugins.frameworks.verl import FORMER
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind

FRAMEWORKS = [one for one in frameworks().values() if len(one.options) > 10]
# Names of two frameworks for the same option, which differ by a letter.
THE_SAME = {("entropy_coef", "entropy_coeff"), ("entropy_coeff", "entropy_coef")}
THE_SAME |= {
    ("use_rollout_log_probs", "use_rollout_logprobs"),
    ("use_rollout_logprobs", "use_rollout_log_probs"),
}


def names(framework: Framework) -> set[str]:
    keys = {one.key for one in framework.options} | {key for one in framework.losses for key in one.options}
    return {key.rpartition(".")[2] for key in keys} | (
        LOSS_OPTIONS if framework.name == "prime-rl" else set()
    )


def misspelt(name: str) -> set[str]:
    """A name without a letter (but the first), with a letter twice, and with two letters swapped."""
    found = set[str]()
    for i in (i for i in range(len(name) - 1) if name[i : i + 2].isalpha()):
        found |= {name[: i + 1] + name[i:], name[:i] + name[i + 1] + name[i] + name[i + 2 :]}
        found |= {name[:i] + name[i + 1 :]} if i else set()
    return found - {name}


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.name)
def test_a_letter_that_is_wrong_means_the_same_option(framework: Framework) -> None:
    known = names(framework)
    tried = {wrong: name for name in known for wrong in misspelt(name) if wrong not in known}
    assert len(tried) > 200
    found = {wrong: near(wrong, known, completes=False) for wrong in tried}
    assert [(wrong, one) for wrong, one in found.items() if tried[wrong] not in one] == []
    assert sum(len(one) > 1 for one in found.values()) <= 4  # `rollout_s` is near to two of them


def test_an_option_that_sets_more_is_not_offered_for_a_part_of_it() -> None:
    loss = of_kind(losses(), "policy")["ppo"]
    (trl,) = (one for one in FRAMEWORKS if one.name == "trl")
    assert counterpart(trl, "clip_ratio_low", loss) is None  # TRL's epsilon sets the upper clip too
    assert counterpart(trl, "clip_ratio_high", loss) == "epsilon_high"


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda one: one.name)
def test_an_option_of_another_framework_or_release_is_no_misspelling(framework: Framework) -> None:
    known = names(framework)
    others = {key.rpartition(".")[2] for key in FORMER}.union(*map(names, FRAMEWORKS)) - known
    assert len(others) > 100
    found = {(one, meant) for one in others for meant in near(one, known, completes=False)}
    assert found <= THE_SAME
