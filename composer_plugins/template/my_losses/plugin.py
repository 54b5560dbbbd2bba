"""The rows of this package's losses. They are data: this module imports no torch."""

from collections.abc import Callable

from composer_plugins.hookspecs import hookimpl
from composer_plugins.losses.row import Loss, Parameter

TESTS = "tests/test_my_losses.py"

LOSSES = (
    Loss(
        name="half_negative",
        kind="policy",
        path="my_losses.kernels:half_negative",
        summary="REINFORCE, with smaller steps for negative advantages",
        paper="your paper, or a link",
        needs=("logprobs", "old_logprobs", "advantages", "mask"),
        parameters={"scale": Parameter("factor of negative advantages", low=0)},
        mode="token-mean",  # the denominator of the paper
        gradient="score",  # a detached weight times log pi, and so not the derivative of the value
        proof=f"{TESTS}::test_half_negative_equals_its_formula",
    ),
    Loss(
        name="logistic_margin",
        kind="preference",
        path="my_losses.kernels:logistic_margin",
        summary="the logistic loss of a scaled margin",
        paper="your paper, or a link",
        needs=("chosen", "rejected"),
        parameters={
            "beta": Parameter("factor of the margin", low=0),
            "margin": Parameter("by how much the chosen response is to win"),
        },
        average=True,  # scores are means over the tokens of a response, not sums
        proof=f"{TESTS}::test_logistic_margin_equals_its_formula",
    ),
    Loss(
        name="absolute_deviation",
        kind="advantage",
        path="my_losses.kernels:absolute_deviation",
        summary="the reward's deviation from its group's mean, in mean absolute deviations",
        paper="your paper, or a link",
        needs=("rewards", "group_ids"),
        optional=("mask",),
        parameters={"eps": Parameter("added to the mean absolute deviation", low=0)},
        proof=f"{TESTS}::test_absolute_deviation_equals_its_formula",
    ),
)


@hookimpl
def register_losses(register: Callable[[Loss], None]) -> None:
    """Register every loss of this package."""
    for loss in LOSSES:
        register(loss)
