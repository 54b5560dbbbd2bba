"""Laws of losses per token: masking, cuts of the batch, order, padding."""

from itertools import cycle
from typing import Any, get_args

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.losses.inputs import INPUTS, TOKENS, TOP_K, VOCAB
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_all_gradients
from composer_plugins.testing.inputs import (
    draw,
    draw_pairs,
    expand_mask,
    float_tensors,
    pad_tokens,
    select_rows,
    tensors,
    with_junk,
)
from composer_plugins.testing.laws.law import (
    PER_TOKEN,
    PER_TOKEN_LOSS,
    NotApplicable,
    law,
    numbers,
    of_the_batch,
    require,
    require_equal,
    require_first_of_pair_raised,
)
from composer_plugins.testing.settings import Setting

DRAWS: list[dict[str, Any]] = [
    {"seed": 0},
    {"seed": 1, "spread": 1.5, "unmasked": 0.5},
    {"seed": 2, "spread": 0.01, "per_token": False, "tokens": 3, "size": 5},
    {"seed": 3, "size": 1, "tokens": 1, "unmasked": 1.0},
]
SHAPES = (TOKENS, VOCAB, TOP_K)


@law(
    *PER_TOKEN,
    cause="a product with the mask (NaN * 0 is NaN), torch.where after exp, or a mean over the padded row: "
    "mask the log ratio before exp (kernels.masking.keep), and do not multiply by the mask",
)
def masked_tokens_have_no_influence(setting: Setting) -> None:
    """NaN, infinities and 1e4 at masked tokens of every input leave the loss and the gradient as they are."""
    for options in DRAWS:
        batch = draw(setting, **options)
        mask = batch["mask"]
        dirty = batch | {
            name: with_junk(x, expand_mask(mask, x))
            for name, x in float_tensors(batch).items()
            if INPUTS[name].shape in SHAPES and x.shape[: mask.dim()] == mask.shape
        }
        weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        wanted, wanted_gradients = value_and_gradients(setting, batch, weight)
        loss, gradients = value_and_gradients(setting, dirty, weight)
        require(not loss[~mask].any(), f"the loss is not 0 where masked: {numbers(loss[~mask])}")
        require_equal(loss, wanted, "the loss depends on what is masked")
        for name, gradient in gradients.items():
            found = f"not 0 where masked: {numbers(gradient[~mask])}"
            require(not gradient[~mask].any(), f"the gradient of {name!r} is {found}")
            require_equal(
                gradient, wanted_gradients[name], f"the gradient of {name!r} depends on what is masked"
            )


def reduced(loss: Tensor, mask: Tensor, mode: Mode, **counts: Any) -> Tensor:
    """The sum of a loss in a mode, with the counts of the whole batch."""
    return aggregate(loss, mask, mode, max_length=11, group_ids=torch.arange(len(mask)), **counts)


def cuts(rows: int, seed: int) -> list[list[Tensor]]:
    """The rows as 1, 2 and 4 micro-batches that end at random places, and as those of two ranks."""
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(rows)
    found = [[index]]
    for parts in (2, 4):
        ends = torch.randperm(max(rows - 1, 0), generator=g)[: parts - 1].sort().values + 1
        found.append([part for part in torch.tensor_split(index, ends.tolist()) if len(part)])
    return [*found, [part for part in (index[::2], index[1::2]) if len(part)]]


@law(
    *PER_TOKEN_LOSS,
    cause="a mean or another statistic of the micro-batch inside the loss: return one loss per token and "
    "leave the division to the adapter; if the loss needs the whole batch, set over_batch=True in its row",
    excuse=of_the_batch,
)
def micro_batches_and_ranks_leave_the_gradient_alone(setting: Setting) -> None:
    """A batch that is cut into 1, 2 or 4 micro-batches, or for two ranks, has the same loss and gradient."""
    modes = cycle(get_args(Mode))
    for options in DRAWS[:3]:
        batch = with_all_gradients(draw(setting, **options))
        mask, trained = batch["mask"], [batch[name] for name in setting.trained]
        rows = mask.shape[0]  # each is a prompt of its own
        counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "num_prompts": rows}
        whole = setting.result(batch)
        magnitude = float(whole.detach().abs().max())
        for parts in cuts(rows, options["seed"]):
            mode = next(modes)
            wanted = reduced(whole, mask, mode)
            cut = [select_rows(batch, index) for index in parts]
            total = torch.stack(
                [reduced(setting.result(part), part["mask"], mode, **counts) for part in cut]
            ).sum()
            what = f"{len(parts)} parts of {rows} rows, {mode}"
            assert_parity(total, wanted, terms=whole.numel(), magnitude=magnitude, what=what)
            ours = torch.autograd.grad(total, trained, materialize_grads=True)
            theirs = torch.autograd.grad(wanted, trained, retain_graph=True, materialize_grads=True)
            for gradient, one in zip(ours, theirs, strict=True):
                assert_parity(gradient, one, terms=whole.numel(), what=f"gradient, {what}")


@law(
    *PER_TOKEN,
    cause="a result that depends on where a row stands: an index, a scan over rows, a random number",
)
def rows_may_come_in_any_order(setting: Setting) -> None:
    """The loss and the gradient of a row do not depend on its place in the batch."""
    for options in DRAWS:
        batch = draw(setting, **options)
        order = torch.randperm(batch["mask"].shape[0], generator=torch.Generator().manual_seed(4))
        loss, gradients = value_and_gradients(setting, batch)
        shuffled, shuffled_gradients = value_and_gradients(setting, select_rows(batch, order))
        assert_parity(shuffled, loss[order], terms=loss.numel())
        for name, gradient in gradients.items():
            assert_parity(shuffled_gradients[name], gradient[order], terms=loss.numel(), what=name)


@law(
    *PER_TOKEN, cause="an axis by its number: tokens are the last axis (-1), and there may be no axis of rows"
)
def packed_tokens_equal_a_padded_row(setting: Setting) -> None:
    """One packed sequence [tokens] has the loss of a batch of one row; so has a batch with one more axis."""
    for options in DRAWS:
        batch = draw(setting, **options | {"size": 1, "unmasked": 1.0})
        batch["mask"][0, -1] = batch["mask"].shape[1] == 1
        packed = batch | {n: x[0] if INPUTS[n].shape in SHAPES else x for n, x in tensors(batch).items()}
        terms = batch["mask"].numel()
        assert_parity(setting.result(packed)[None], setting.result(batch), terms=terms, what="packed")
        nested = batch | {n: x[None] for n, x in tensors(batch).items()}
        assert_parity(setting.result(nested)[0], setting.result(batch), terms=terms, what="three axes")


@law(
    *PER_TOKEN,
    cause="the length of the padded row, where mask.sum(-1) is meant; or a product with the mask",
)
def more_padding_changes_nothing(setting: Setting) -> None:
    """Masked columns at the end of every row, up to 40 tokens in all, change nothing."""
    for options in DRAWS[:3]:
        batch = draw(setting, **options)
        columns = batch["mask"].shape[1]
        loss, gradients = value_and_gradients(setting, batch)
        for more in (3, 40 - columns):
            padded, padded_gradients = value_and_gradients(setting, pad_tokens(batch, more))
            require(not padded[:, columns:].any(), "the loss is not 0 at the padding")
            assert_parity(padded[:, :columns], loss, terms=columns, what=f"{more} more columns")
            for name, gradient in gradients.items():
                found = padded_gradients[name][:, :columns]
                assert_parity(found, gradient, terms=columns, what=f"gradient of {name}, {more} more columns")


@law(
    "policy",
    cause="a sign: the loss is minimised, so it is -advantage * ratio, and gradient descent raises the "
    "log-probability of tokens with a positive advantage",
)
def descent_raises_the_tokens_with_positive_advantages(setting: Setting) -> None:
    """Descent lowers no token with A = 1, and raises it more than the same token with A = -1.

    All policies are equal. A loss may learn from one sign alone (RAFT, NSR), or raise every token (AWR).
    Where tokens with A = 0 have no gradient, a penalty does not push them away from the reference or the
    teacher, or from the old policy of a loss that has neither of them.
    """
    if setting.trained != ("logprobs",) or "advantages" not in setting.inputs:
        raise NotApplicable("its policy input is not logprobs, or it has no advantages")
    batch = draw_pairs(setting)
    batch["advantages"] = torch.ones_like(batch["logprobs"])
    batch["advantages"][1::2] = -1
    gradient = value_and_gradients(setting, batch)[1]["logprobs"]
    require_first_of_pair_raised(gradient, "A = 1", "A = -1", never_lowered=True)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
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
    gradient = value_and_gradients(setting, batch)[1]["student_logprobs"]
    require_first_of_pair_raised(
        gradient, "likely tokens", "unlikely tokens of the teacher", never_lowered=False
    )


@law("kl", cause="a sign, or the policy and the reference exchanged")
def expectation_over_the_policy_is_not_negative(setting: Setting) -> None:
    """Summed over the vocabulary with the policy's probabilities an estimate of a KL is not negative."""
    if {"logprobs", "ref_logprobs"} - {*setting.inputs}:
        raise NotApplicable("it does not compare logprobs with ref_logprobs")
    for seed in range(4):
        # A row for each entry of the vocabulary: of one token, because a row may be one sequence to the loss.
        batch = draw(setting, seed, size=6, tokens=1, unmasked=1.0)
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
    batch = draw(setting, unmasked=1.0)
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
