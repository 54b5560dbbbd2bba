"""What the measurements say about a run with these hints."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from composer_plugins.errors import Finding, Severity
from composer_plugins.teacher.measuring import Measured

LEAKS = 0.05  # a share of completions; more is worth a warning
ERRORS = 2  # standard errors; a gain below is not told apart from none
CLOSE = 0.01  # nats per token; a teacher that is closer to the policy teaches hardly anything


class Advice(NamedTuple):
    """The template to train with, None if none helps; and what was found about each."""

    best: Measured | None
    findings: tuple[Finding, ...]


def advice(found: Sequence[Measured]) -> Advice:
    """Return, of the templates whose teacher earns more than the policy, the one nearest to the policy.

    The sampled reward is the mean reward of the distribution that the hint channel moves the policy to, and
    KL(T || S) is how far it moves it: a nearer teacher changes the answer rather than its manner.
    A template whose teacher does not see its hint, or repeats the wording of the hints, is not chosen.
    """
    policy, *others = found
    teachers = [one for one in others if not one.control]
    findings = tuple(Finding(how, one.name, *words) for one in others for how, *words in _faults(policy, one))
    wrong = {finding.key for finding in findings if finding.severity != "info"}
    good = [one for one in teachers if one.name not in wrong]
    return Advice(min(good, key=lambda one: one.forward_kl, default=None), findings)


def _faults(policy: Measured, one: Measured) -> Iterator[tuple[Severity, str, str]]:
    """The severity, the problem and the remedy of each."""
    if one.control:
        problem = f"the right hint earns {one.better:.3f} ± {one.better_error:.3f} more than this control"
        if one.better > ERRORS * one.better_error:
            yield "info", problem, "keep these hints, of which more than the form helps"
        else:
            yield "warning", problem, "measure more rows, or write hints that say more of their own row"
        return
    if one.shown < 1:
        problem = f"the teacher cannot read its whole hint in {1 - one.shown:.0%} of the rows"
        remedy = "set a chat template and a template that show it, or shorten the hints"
        yield "error", problem, remedy
    if not one.gain > ERRORS * one.gain_error:
        problem = f"with its hint the teacher's sampled completions earn {one.sampled:.3f}, the policy's own "
        problem += f"{policy.sampled:.3f}: a gain of {one.gain:.3f} ± {one.gain_error:.3f}"
        remedy = "measure more rows, or write hints that say more, another template, or set hint_weight=0"
        is_worse = one.gain < -ERRORS * one.gain_error
        yield ("error" if is_worse else "warning"), problem, remedy
    if one.leaks > LEAKS:
        problem = f"{one.leaks:.0%} of the teacher's completions repeat the wording of the hints, which the "
        problem += "policy would learn to write without having a hint"
        remedy = "use a template that asks for the answer only, or hints without such a wording"
        yield "warning", problem, remedy
    if one.forward_kl < CLOSE:
        problem = f"the teacher is {one.forward_kl:.2g} nats per token from the policy"
        yield "warning", problem, "write hints that change what the teacher would say"
    if one.ordered < 0.5:
        problem = f"of two completions of one prompt the teacher prefers the better one in {one.ordered:.0%}"
        remedy = "use a divergence over the vocabulary, such as jsd, which needs no order of completions"
        yield "info", problem, remedy
