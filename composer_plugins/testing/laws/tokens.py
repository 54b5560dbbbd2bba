"""Laws of losses per token: masking, cuts of the batch, order, padding."""

from typing import Any

import torch
from torch import Tensor

from composer_plugins.losses.inputs import INPUTS, TOKENS
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import DRAWS, JUNK, Batch, select_rows, tensors
from composer_plugins.testing.law import (
    FUNCTION,
    PER_TOKEN,
    PER_TOKEN_LOSS,
    BrokenLaw,
    NotApplicable,
    law,
    numbers,
    of_the_batch,
    require,
    some_raised_more,
)
from composer_plugins.testing.report import Finding
from composer_plugins.testing.settings import SHAPES, Found, Setting, draw_pairs, value_and_gradients


def require_zero_where_masked(found: Found, batch: Batch, what: str = "{}") -> None:
    """Require that a loss and its gradients are 0 at masked tokens, where they have one number per token."""
    mask = batch.get("mask")
    for name, x in found.items():
        if mask is not None and x.shape[: mask.dim()] == mask.shape:
            found_there = f"is not 0 where masked: {numbers(x[~mask])}"
            require(not x[~mask].any(), f"{what.format(name)} {found_there}")


def require_masked(setting: Setting, junk: Tensor | None = None, finding: Finding | None = None) -> None:
    """Require that other numbers at masked tokens change nothing, and that the gradient there is 0."""
    for batch in setting.batches():
        wanted, problems = setting.run(batch, weighted=True), []
        require_zero_where_masked(wanted, batch)
        for what, dirty in setting.masked(batch, junk):
            try:
                setting.compare(setting.run(dirty, weighted=True), wanted, f"{what}, {{}}", exactly=True)
            except BrokenLaw as error:
                problems.append(str(error))
        require(not problems, "; ".join(problems), finding=finding)


MASK_LOGITS = (
    "a product with the mask (NaN * 0 is NaN), or torch.where after log_softmax: mask the logits and the "
    "log-probabilities before it, kernels.masking.keep(logits, mask.unsqueeze(-1))"
)


@law(
    *PER_TOKEN,
    cause="a product with the mask (NaN * 0 is NaN), torch.where after exp, or a mean over the padded row: "
    "mask the log ratio before exp (kernels.masking.keep), and do not multiply by the mask",
    causes={"divergence": MASK_LOGITS},
    own={
        FUNCTION: dict(
            summary="Other finite numbers at masked tokens of every input leave the loss and the gradient as "
            "they are.",
        ),
    },
)
def masked_tokens_have_no_influence(setting: Setting) -> None:
    """Other numbers at masked tokens, NaN and infinities too, leave the loss and the gradient as they are."""
    require_masked(setting)
    if not setting.one_number:
        require_masked(setting, JUNK, "unsafe")


@law(
    FUNCTION,
    finding="unsafe",
    cause="a product with the mask: NaN * 0 and inf * 0 are NaN. Mask with torch.where before exp; after it, "
    "the gradient is NaN even so",
)
def masked_nan_and_infinities_have_no_influence(setting: Setting) -> None:
    """NaN, infinities and 1e4 at masked tokens of every input leave the loss and the gradient as they are."""
    require_masked(setting, JUNK)


@law(
    *PER_TOKEN_LOSS,
    cause="a mean or another statistic of the micro-batch inside the loss: return one loss per token and "
    "leave the division to the adapter; if the loss needs the whole batch, set over_batch=True in its row",
    excuse=of_the_batch,
    own={
        "preference": dict(
            name="parts_of_a_batch_are_the_batch",
            cause="a mean or another statistic of the pairs: return one loss per pair; if the loss needs the "
            "whole batch, set over_batch=True in its row",
        ),
        FUNCTION: dict(
            cause="a mean or another statistic of the micro-batch inside the function: divide by the counts "
            "of the whole batch, which the framework passes or divides by itself. SkyRL and Tinker add up "
            "what a function returns, so return the sum: a mean of B rows of T tokens is B T times too small",
        ),
    },
)
def micro_batches_and_ranks_leave_the_gradient_alone(setting: Setting) -> None:
    """A batch that is cut into 1, 2 or 4 micro-batches, or for two ranks, has the same loss and gradient."""
    for batch in setting.batches(to_be_cut=True):
        wanted = setting.run(batch)
        for cut in setting.cuts(batch):
            setting.compare(setting.run(batch, cut=cut), wanted, f"{{}} of {cut.what}")


# A loss of verl or TRL with such a term breaks the law of micro-batches and ranks, in the cut for two ranks.
@law(
    FUNCTION,
    cause="a KL or an entropy term that is a sum: the advantages are divided by the counts of the batch, and "
    "this term is not. Use the framework's own option (SkyRL: use_kl_loss, use_entropy_loss), or put the "
    "term into the advantages before they are divided",
    frameworks=("skyrl", "tinker"),
)
def every_term_is_divided_as_the_advantages_are(function: Any) -> None:
    """The same rows have half the loss and gradient in a batch that has twice as many rows and tokens."""
    if not function.uses_advantages:
        raise NotApplicable("other advantages change nothing, and they hold the denominator")
    for batch in function.batches():
        half = {name: x / 2 for name, x in function.run(batch).items()}
        found = function.run(batch, times=2)
        what = "with half the advantages, as in a batch of twice the size, {}"
        function.compare(found, half, what)


@law(
    *PER_TOKEN,
    FUNCTION,
    cause="a result that depends on where a row stands: an index, a scan over rows, a random number",
    own={
        "preference": dict(
            name="pairs_may_come_in_any_order",
            summary="The loss and the gradient of a pair do not depend on its place in the batch.",
            cause="a result that depends on where a pair stands",
            excuse=of_the_batch,
        ),
    },
)
def rows_may_come_in_any_order(setting: Setting) -> None:
    """The loss and the gradient of a row do not depend on its place in the batch."""
    for batch in setting.batches():
        rows = len(batch[setting.trained[0]] if setting.trained else batch["mask"])
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
        wanted = {name: x[order] if x.dim() else x for name, x in setting.run(batch).items()}
        setting.compare(setting.run(select_rows(batch, order)), wanted, "{} of another order of the rows")


@law(
    *PER_TOKEN,
    cause="an axis by its number: tokens are the last axis (-1), and there may be no axis of rows",
    no_function="the convention has one layout",
)
def packed_tokens_equal_a_padded_row(setting: Setting) -> None:
    """One packed sequence [tokens] has the loss of a batch of one row; so has a batch with one more axis."""
    for options in DRAWS:
        batch = setting.draw(**options | {"size": 1, "unmasked": 1.0})
        batch["mask"][0, -1] = batch["mask"].shape[1] == 1
        packed = batch | {n: x[0] if INPUTS[n].shape in SHAPES else x for n, x in tensors(batch).items()}
        terms = batch["mask"].numel()
        assert_parity(setting.result(packed)[None], setting.result(batch), terms=terms, what="packed")
        nested = batch | {n: x[None] for n, x in tensors(batch).items()}
        assert_parity(setting.result(nested)[0], setting.result(batch), terms=terms, what="three axes")


@law(
    *PER_TOKEN,
    FUNCTION,
    cause="the length of the padded row, where mask.sum(-1) is meant; or a product with the mask",
)
def more_padding_changes_nothing(setting: Setting) -> None:
    """Masked columns at the end of every row, up to 40 tokens in all, change nothing."""
    for batch in setting.batches():
        wanted = setting.run(batch)
        for what, padded in setting.padded(batch):
            found = setting.run(padded)
            require_zero_where_masked(found, padded, f"{what}, {{}}")
            ours = {name: x[tuple(map(slice, wanted[name].shape))] for name, x in found.items()}
            setting.compare(ours, wanted, f"{what}, {{}}")


WITHOUT_ADVANTAGES = "a cross-entropy and a distillation have none. Any other loss must use its advantages"


@law(
    "policy",
    FUNCTION,
    cause="a sign: the loss is minimised, so it is -advantage * ratio, and gradient descent raises the "
    "log-probability of tokens with a positive advantage",
)
def descent_raises_the_tokens_with_positive_advantages(setting: Setting) -> None:
    """Descent lowers no token with A = 1, and raises it more than the same token with A = -1.

    All policies are equal. A loss may learn from one sign alone (RAFT, NSR), or raise every token (AWR).
    Where tokens with A = 0 have no gradient, a penalty does not push them away from the reference or the
    teacher, or from the old policy of a loss that has neither of them.
    """
    if "advantages" not in setting.inputs:
        raise NotApplicable("it has no advantages")
    if not getattr(setting, "uses_advantages", True):
        what = "other advantages change nothing where the policies are equal"
        raise BrokenLaw(what, WITHOUT_ADVANTAGES, finding="unsafe")
    raised, words = False, ("a positive advantage", "its negative")
    for signs in setting.both_signs():
        positive = signs.advantages.reshape(len(signs.mask), -1) > 0
        more = torch.where(positive, signs.raised, signs.negated)
        less = torch.where(positive, signs.negated, signs.raised)
        raised |= some_raised_more(more, less, *words, never_lowered=True)
    require(raised, f"gradient descent raises no token more with {words[0]} than with {words[1]}")
    require_no_push(setting)


def require_no_push(setting: Setting) -> None:
    """Require that descent does not lower tokens with A = 0 that another policy finds more likely."""
    batch = draw_pairs(setting)
    batch["advantages"] = torch.zeros_like(batch["logprobs"])
    if value_and_gradients(setting, batch)[1]["logprobs"].any():
        return  # it raises or lowers such tokens, by an importance weight that may depend on the other policy
    others = {one for one in batch if one.endswith("_logprobs") and INPUTS[one].shape == TOKENS}
    for name in sorted(others & {"ref_logprobs", "teacher_logprobs"} or others):
        shift = torch.full_like(batch[name], 0.01)
        shift[1::2] = -0.01
        raised = -value_and_gradients(setting, batch | {name: batch[name] + shift})[1]["logprobs"]
        found = f"by {numbers(raised[0])} with higher {name!r}, and by {numbers(raised[1])} with lower"
        require((raised[::2] >= raised[1::2]).all(), f"gradient descent raises tokens with A = 0 {found}")


@law(
    "divergence",
    cause="a sign, or the student and the teacher exchanged: gradient descent raises the log-probability of "
    "a sampled token that the teacher finds more likely",
)
def descent_raises_the_tokens_that_the_teacher_prefers(setting: Setting) -> None:
    """Descent raises a sampled token more, the more likely the teacher finds it."""
    if setting.trained != ("student_logprobs",) or "teacher_logprobs" not in setting.inputs:
        raise NotApplicable("it does not compare student and teacher at the sampled tokens alone")
    batch = draw_pairs(setting)
    batch["teacher_logprobs"][::2] *= 0.9
    batch["teacher_logprobs"][1::2] *= 1.1
    raised = -value_and_gradients(setting, batch)[1]["student_logprobs"]
    words = ("likely tokens of the teacher", "unlikely ones")
    require(some_raised_more(raised[::2], raised[1::2], *words), "gradient descent raises all tokens alike")


@law("kl", cause="a sign, or the policy and the reference exchanged")
def expectation_over_the_policy_is_not_negative(setting: Setting) -> None:
    """Summed over the vocabulary with the policy's probabilities an estimate of a KL is not negative."""
    if {"logprobs", "ref_logprobs"} - {*setting.inputs}:
        raise NotApplicable("it does not compare logprobs with ref_logprobs")
    for seed in range(4):
        # A row for each entry of the vocabulary: of one token, because a row may be one sequence to the loss.
        batch = setting.draw(seed, size=6, tokens=1, unmasked=1.0)
        drawn = {name: torch.log_softmax(batch[name], 0) for name in ("logprobs", "ref_logprobs")}
        sampled = {name: drawn["logprobs"] for name in ("old_logprobs", "rollout_logprobs") if name in batch}
        loss = setting.result(batch | drawn | sampled)
        expectation = (drawn["logprobs"].exp() * loss).sum()
        require(expectation > 0, f"the expectation is {float(expectation):.6g}")
        equal = setting.result(batch | drawn | sampled | {"ref_logprobs": drawn["logprobs"]})
        require((equal.abs() < 1e-12).all(), f"of two equal policies it is {numbers(equal)}")


@law("divergence", cause="a sign, or the student and the teacher exchanged")
def descent_moves_the_student_to_the_teacher(setting: Setting) -> None:
    """A step of the student towards the teacher does not raise the loss.

    The step is that of the mixture (1 - e) S + e T. It lowers every loss that is convex in S and least at T.
    Of a teacher's top k, the step moves the student's probabilities of these entries, and not their sum. It
    lowers every f-divergence, whether the other entries are left out, scaled away or one entry more.
    """
    batch = setting.draw(unmasked=1.0)
    if "student_logits" not in setting.trained or not {"teacher_logits", "teacher_topk_ids"} & {*batch}:
        raise NotApplicable("it has no logits of the student, or none of the teacher")
    gradient = value_and_gradients(setting, batch)[1]["student_logits"]
    if "teacher_logits" in batch:
        gap = batch["teacher_logits"].log_softmax(-1) - batch["student_logits"].log_softmax(-1)
        step = gap.expm1()  # of log S
    else:
        ids = batch["teacher_topk_ids"]
        logits = (batch["student_logits"] / (setting.choice.value("temperature") or 1.0)).gather(-1, ids)
        gap = batch["teacher_topk_logprobs"] - logits
        mean = (logits.softmax(-1) * gap).sum(-1, keepdim=True)
        step = torch.zeros_like(gradient).scatter(-1, ids, gap - mean)
    slope = (gradient * step).sum(-1)
    require((slope <= 1e-12).all(), f"towards the teacher the loss has the slopes {numbers(slope)}")
