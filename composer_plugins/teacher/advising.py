"""What the measurements say about a run with these hints."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from composer_plugins.errors import Finding
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

    The sampled reward is that of the distribution that the hint channel moves the policy to, and KL(T || S)
    is how far it moves it: what a nearer teacher changes is rather the answer than the manner of the reply.
    A template whose teacher does not see its hint, or repeats the wording of the hints, is not chosen.
    """
    policy, *teachers = found
    findings = tuple(finding for one in teachers for finding in _findings(policy, one))
    wrong = {finding.key for finding in findings if finding.severity != "info"}
    good = [one for one in teachers if one.name not in wrong]
    return Advice(min(good, key=lambda one: one.forward_kl, default=None), findings)


def _findings(policy: Measured, one: Measured) -> Iterator[Finding]:
    if one.shown < 1:
        problem = f"the teacher cannot read its whole hint in {1 - one.shown:.0%} of the rows"
        remedy = "set a chat template and a template that show it, or shorten the hints"
        yield Finding("error", one.name, problem, remedy)
    if not one.gain > ERRORS * one.gain_error:
        problem = f"with its hint the teacher's sampled completions earn {one.sampled:.3f}, the policy's own "
        problem += (
            f"{policy.sampled:.3f}: a gain of {one.gain:.3f} with a standard error of {one.gain_error:.3f}"
        )
        remedy = "measure more rows, or write hints that say more, another template, or set hint_weight=0"
        is_worse = one.gain < -ERRORS * one.gain_error
        yield Finding("error" if is_worse else "warning", one.name, problem, remedy)
    if one.leaks > LEAKS:
        problem = f"{one.leaks:.0%} of the teacher's completions repeat the wording of the hints, which the "
        problem += "policy would learn to write without having a hint"
        remedy = "use a template that asks for the answer only, or hints without such a wording"
        yield Finding("warning", one.name, problem, remedy)
    if one.forward_kl < CLOSE:
        problem = f"the teacher is {one.forward_kl:.2g} nats per token from the policy"
        yield Finding("warning", one.name, problem, "write hints that change what the teacher would say")
    if one.ordered < 0.5:
        problem = f"of two completions of one prompt the teacher prefers the better one in {one.ordered:.0%}"
        remedy = (
            "use a divergence over the vocabulary, which needs no order of completions (jsd), with this hint"
        )
        yield Finding("info", one.name, problem, remedy)
