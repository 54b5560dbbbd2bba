"""Laws of preference losses: direction; and of what a loss declares about the batch."""

import torch

from composer_plugins.testing.law import LOSS, NotApplicable, law, numbers, require, some_raised_more
from composer_plugins.testing.laws.tokens import micro_batches_and_ranks_leave_the_gradient_alone
from composer_plugins.testing.settings import Setting, draw_pairs, require_one_without, value_and_gradients


@law("preference", cause="chosen and rejected exchanged, or a sign")
def descent_raises_the_chosen_over_the_rejected(setting: Setting) -> None:
    """Where both scores are close to those of the reference, gradient descent raises the margin.

    It raises no negative log-likelihood. If the reference prefers the chosen more, the loss does not fall.
    """
    if not {"chosen", "rejected"} <= {*setting.trained}:
        raise NotApplicable("it has no chosen and rejected scores with a gradient")
    batch = setting.draw(size=6)
    others: tuple[str, ...] = ("rejected", "ref_chosen", "ref_rejected")
    same = {name: batch["chosen"].clone() for name in others if name in batch}
    # A hinge at 0 has no slope where the scores are equal.
    near = same | {"rejected": same["rejected"] + 0.01}
    gradients = value_and_gradients(setting, batch | near)[1]
    slope = gradients["chosen"] - gradients["rejected"]
    require((slope < 0).all(), f"the slope of the loss in the margin is {numbers(slope)}")
    for name in ("chosen_nll", "gold_nll"):
        if name in gradients:
            found = f"the slope of the loss in {name!r} is {numbers(gradients[name])}"
            require((gradients[name] >= 0).all(), found)
    for name, shift in (("ref_chosen", 0.5), ("ref_rejected", -0.5)):
        if name in batch:
            change = setting.result(batch | same | {name: same[name] + shift}) - setting.result(batch | same)
            found = f"if the reference prefers the chosen more, by {name!r}, it changes by {numbers(change)}"
            require((change >= -1e-12).all(), found)


@law("preference", cause="desirable and undesirable exchanged, or a sign, also of the reference")
def descent_raises_the_desirable_over_the_undesirable(setting: Setting) -> None:
    """Where the scores are those of the reference, descent raises desirable rows more than undesirable ones.

    If the reference prefers a row more, or if the number that rewards are compared with is higher, the loss
    of a desirable row does not fall, and the loss of an undesirable row does not rise.
    """
    if not {"scores", "desirable"} <= {*setting.inputs}:
        raise NotApplicable("it has no scores of desirable and undesirable rows")
    batch = draw_pairs(setting)
    batch["desirable"] = torch.arange(len(batch["scores"])) % 2 == 0
    if "ref_scores" in batch:
        batch["ref_scores"] = batch["scores"].clone()
    raised = -value_and_gradients(setting, batch)[1]["scores"]
    words = ("desirable=True", "desirable=False")
    some = some_raised_more(raised[::2], raised[1::2], *words, never_lowered=True)
    require(some, "gradient descent raises all rows alike")
    for name in ("ref_scores", "reference_kl", "reward_shift"):
        if name in batch:
            change = setting.result(batch | {name: batch[name] + 0.5}) - setting.result(batch)
            agrees = torch.where(batch["desirable"], change >= -1e-12, change <= 1e-12).all()
            found = f"rows with desirable=True, False, True ... change by {numbers(change)}"
            require(agrees, f"if {name!r} is higher, the losses of {found}")


@law(
    *LOSS,
    cause="a loss that does not need the whole batch: do not declare over_batch, or the adapters refuse it "
    "where a framework cuts the batch",
    no_function="a function of this convention declares nothing",
)
def declared_statistic_of_the_batch_is_one(setting: Setting) -> None:
    """A loss that declares over_batch changes where the batch is cut."""
    if not setting.loss.over_batch:
        raise NotApplicable("it does not declare over_batch")
    problem = "it declares over_batch, and the parts of a batch have the losses of the batch"
    require_one_without(setting, micro_batches_and_ranks_leave_the_gradient_alone, problem)
