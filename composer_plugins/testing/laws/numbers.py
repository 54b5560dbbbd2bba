"""Where numbers run out: overflow, NaN, -inf, one token, no token, half precision."""

import math

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.inputs import INPUTS, PAIRS, ROWS, TOKENS, VOCAB
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.gradients import value_and_gradients, with_trained_gradients
from composer_plugins.testing.inputs import Batch, draw, float_tensors, tensors
from composer_plugins.testing.laws.law import (
    EITHER,
    EVERY,
    PER_TOKEN,
    PER_TOKEN_LOSS,
    NotApplicable,
    law,
    numbers,
    numbers_of,
    of_the_batch,
    require,
    require_equal,
)
from composer_plugins.testing.laws.tokens import DRAWS, SHAPES
from composer_plugins.testing.settings import UNIFORM, Setting

# In nats: exp overflows float32 at 88.7, and float64 at 709.8.
FARS = ((torch.float32, 30.0), (torch.float32, 90.0), (torch.float32, 1e4), (torch.float64, 800.0))
# How far apart the policies are: inside a clip, beyond some, beyond all, beyond where exp overflows.
SPREADS = (0.01, 0.4, 3.0, 1e4)
OVERFLOW = "exp of an unbounded log ratio: use kernels.masking.safe_exp, or kernels.ratios"
NAN = "nan_to_num, a clamp, or a comparison that is False for NaN: let NaN through, so that a user sees it"


def require_finite(setting: Setting, batch: Batch, what: str, *, value: bool = True) -> None:
    """Require a finite gradient, and a finite loss unless `value` is False."""
    loss, gradients = value_and_gradients(setting, batch)
    require(not value or loss.isfinite().all(), f"{what}: loss {numbers(loss)}")
    for name, gradient in gradients.items():
        require(gradient.isfinite().all(), f"{what}: gradient of {name} {numbers(gradient)}")


@law(*PER_TOKEN, cause=OVERFLOW)
def policies_far_apart_give_finite_numbers(setting: Setting) -> None:
    """Log ratios of 30, 90, 800 and 10,000 nats give a finite loss and gradient."""
    for dtype, far in FARS:
        batch = draw(setting, unmasked=1.0, spread=0.0, dtype=dtype)
        names = [name for name in batch if name.endswith("logprobs") and INPUTS[name].shape == TOKENS]
        if "advantages" in batch:
            batch["advantages"] = batch["advantages"].sign() * 5
        near = torch.full_like(batch["mask"], -0.1, dtype=dtype)
        for moved in [*([name] for name in names), names[1:]]:  # one at a time, then all but the policy's
            for values in (near - far, torch.where(torch.arange(4)[:, None] < 2, near, near - far)):
                given = {name: values if name in moved else near for name in names}
                require_finite(setting, batch | given, f"{', '.join(moved)} {far:g} nats lower, {dtype}")


@law("preference", cause="exp of a margin: use logsigmoid or softplus")
def scores_far_apart_give_finite_numbers(setting: Setting) -> None:
    """Scores of -1e2, -1e4 and -1e6 give a finite loss and gradient in float32."""
    for far in (1e2, 1e4, 1e6):
        batch = draw(setting, size=4, dtype=torch.float32)
        for name in float_tensors(batch):
            if name.removeprefix("ref_") in ("chosen", "rejected", "scores"):
                moved = batch[name].clone()
                moved[:2] = -far
                require_finite(setting, batch | {name: moved}, f"{name} = {-far:g}")


@law(*PER_TOKEN_LOSS, cause="a product of large numbers in float32")
def advantages_of_any_size_give_finite_numbers(setting: Setting) -> None:
    """Advantages times 1e-30, 1e6 and 1e20 give a finite gradient in float32, and a finite loss up to 1e18.

    The square of 1e20 is not a float32: the loss of a regression to the advantages overflows there.
    """
    if "advantages" not in setting.inputs:
        raise NotApplicable("it has no advantages")
    for scale in (1e-30, 1e6, 1e18, 1e20):
        batch = draw(setting, dtype=torch.float32)
        given, what = batch | {"advantages": batch["advantages"] * scale}, f"advantages * {scale:g}"
        require_finite(setting, given, what, value=scale < 1e20)


@law(*PER_TOKEN, cause=NAN, excuse=of_the_batch)
def nan_is_seen_in_its_row_and_in_no_other(setting: Setting) -> None:
    """NaN at an unmasked token gives NaN there, and nothing outside its row."""
    for options in DRAWS:
        batch = draw(setting, **options)
        batch["mask"][0, 0] = True
        for name, x in float_tensors(batch).items():
            if INPUTS[name].shape not in SHAPES or name == UNIFORM:
                continue
            poisoned = x.clone()
            poisoned[0, 0] = torch.nan
            if x.dim() == 3:  # one entry of the vocabulary is enough
                poisoned[0, 0, 1:] = x[0, 0, 1:]
            loss, gradients = value_and_gradients(setting, batch | {name: poisoned})
            require(
                loss[0, 0].isnan(), f"NaN in {name!r} is hidden: the loss there is {float(loss[0, 0]):.6g}"
            )
            require(loss[1:].isfinite().all(), f"NaN in {name!r} reaches other rows")
            require(not loss[~batch["mask"]].any(), f"NaN in {name!r} reaches masked tokens")
            for other, gradient in gradients.items():
                require(
                    gradient[1:].isfinite().all(),
                    f"NaN in {name!r} reaches the gradient of {other!r} elsewhere",
                )


def one_of_each_row(mask: Tensor) -> list[tuple[int, int]]:
    """An unmasked token of each row that has one: in turn the last, the first, and one in the middle."""
    found = []
    for row, unmasked in enumerate(mask):
        columns = unmasked.nonzero().flatten().tolist()
        if columns:
            found.append((row, columns[(-1, 0, len(columns) // 2)[row % 3]]))
    return found


def poisoned_at(x: Tensor, where: list[tuple[int, int]]) -> Tensor:
    """`x` with NaN at these tokens; of a vocabulary, at one entry."""
    x = x.clone()
    for token in where:
        x[token if x.dim() == 2 else (*token, 0)] = torch.nan
    return x


def is_linear(setting: Setting, name: str) -> bool:
    """Whether the gradient in an input does not depend on it, as that of -A log pi."""
    batch = draw(setting, unmasked=1.0)
    gradients = [
        value_and_gradients(setting, batch | {name: batch[name] - shift})[1] for shift in (0.0, 0.37)
    ]
    return torch.equal(gradients[0][name], gradients[1][name])


@law(
    *PER_TOKEN_LOSS,
    cause=f"{NAN}. torch.clamp has the gradient 0 at NaN: bound a log ratio with kernels.masking.bounded, or "
    "give it the advantages' NaN with kernels.masking.with_nan_of. Or a token, or a row, that does not count",
)
def nan_in_an_input_is_nan_in_the_gradient_of_its_token(setting: Setting) -> None:
    """NaN in any input is NaN in the loss and the gradient of its token, wherever the token stands."""
    shapes = {name: INPUTS[name].shape for name in float_tensors(draw(setting)) if name != UNIFORM}
    for name in [name for name, shape in shapes.items() if shape in SHAPES]:
        if name in setting.trained and is_linear(setting, name):
            nan_logits_are_nan_in_their_gradient(setting, name)
            continue
        for seed, spread in enumerate(SPREADS):
            batch = draw(setting, seed, spread=spread, size=12, tokens=20)
            where = one_of_each_row(batch["mask"])
            loss, gradients = value_and_gradients(setting, batch | {name: poisoned_at(batch[name], where)})
            for token in where:
                what = f"NaN in {name!r}, spread {spread}"
                require(loss[token].isnan(), f"{what}: the loss is {float(loss[token]):.6g}")
                if name in EITHER:  # a bonus: its slope is constant
                    continue
                found = {other: gradient[token] for other, gradient in gradients.items()}
                seen = any(bool(g.isnan().any()) for g in found.values())
                require(seen, f"{what}: {numbers_of(found)}")


def nan_logits_are_nan_in_their_gradient(setting: Setting, name: str) -> None:
    """Of a loss with a constant slope in log pi: NaN logits give a NaN gradient of the logits."""
    batch = draw(setting, unmasked=1.0)
    logits = torch.randn(*batch["mask"].shape, 5, dtype=torch.float64)
    logits[0, 0, 1] = torch.nan
    logits.requires_grad_()
    loss = setting.result(batch | {name: logits.log_softmax(-1)[..., 0]})
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    require(gradient[0, 0].isnan().all(), f"NaN logits: the gradient is {numbers(gradient[0, 0])}")


@law("preference", cause=NAN, excuse=of_the_batch)
def nan_is_seen_in_its_pair_and_in_no_other(setting: Setting) -> None:
    """NaN in a score is NaN in its pair, and in no other."""
    batch = draw(setting, size=5)
    for name, x in float_tensors(batch).items():
        if INPUTS[name].shape not in (PAIRS, ROWS):
            continue
        poisoned = x.clone()
        poisoned[2] = torch.nan
        loss, gradients = value_and_gradients(setting, batch | {name: poisoned})
        seen = [loss[2], *(g[2] for g in gradients.values())]
        require(any(bool(s.isnan()) for s in seen), f"NaN in {name!r} is hidden")
        others = [loss[[0, 1, 3, 4]], *(g[[0, 1, 3, 4]] for g in gradients.values())]
        require(all(bool(s.isfinite().all()) for s in others), f"NaN in {name!r} reaches other pairs")


@law("preference", cause=NAN)
def nan_in_a_score_is_nan_in_a_gradient(setting: Setting) -> None:
    """NaN in a score is NaN in a gradient, however far the scores are apart."""
    for spread in (0.3, 30.0, 1e6):
        batch = draw(setting, size=12, spread=spread)
        for name, x in float_tensors(batch).items():
            if name.endswith("_nll"):  # a term with a constant slope
                continue
            given = x.clone()
            given[10 if INPUTS[name].shape in (PAIRS, ROWS) else ...] = torch.nan
            _, gradients = value_and_gradients(setting, batch | {name: given})
            seen = any(bool(g.isnan().any()) for g in gradients.values())
            require(seen, f"NaN in {name!r}: {numbers_of(gradients)}")


@law(
    *PER_TOKEN_LOSS,
    cause="a division by the number of tokens, or a return of a constant: the loss of a masked-out batch is "
    "0 and has a gradient, or DDP waits for it",
)
def batch_without_an_unmasked_token_gives_zero_with_a_gradient(setting: Setting) -> None:
    """A batch that is masked out gives 0, with a gradient of 0."""
    batch = draw(setting)
    for junk in (None, torch.nan, torch.inf):
        given = {n: x if junk is None else torch.full_like(x, junk) for n, x in float_tensors(batch).items()}
        mask = torch.zeros_like(batch["mask"])
        empty = with_trained_gradients(setting, batch | given | {"mask": mask})
        loss = setting.result(empty)
        require(not loss.any(), f"the loss is {numbers(loss)}")
        total = aggregate(loss, mask, "token-mean")
        require(bool(total == 0), f"its mean is {float(total.detach())}")
        require(total.requires_grad, "it has no gradient")
        total.backward()
        for name in setting.trained:
            gradient = empty[name].grad
            shown = None if gradient is None else numbers(gradient)
            require(gradient is not None and not gradient.any(), f"the gradient of {name!r} is {shown}")


@law(*EVERY, cause="arithmetic before an upcast: x.float() first, or kernels.masking.at_least_float32")
def half_precision_is_upcast_before_anything_else(setting: Setting) -> None:
    """In bfloat16 and float16 the result is that of float32 on the same numbers, in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        half = draw(setting, spread=0.5, dtype=dtype)
        single = half | {name: x.float() for name, x in float_tensors(half).items()}
        ours, wanted = value_and_gradients(setting, half), value_and_gradients(setting, single)
        require(ours[0].dtype == torch.float32, f"the result for {dtype} is {ours[0].dtype}")
        require_equal(ours[0], wanted[0], f"{dtype}: not the float32 result on the same numbers")
        for name, gradient in ours[1].items():
            require(gradient.dtype == dtype, f"the gradient of {name!r} is {gradient.dtype}")
            if setting.loss.kind in PER_TOKEN:
                assert_parity(
                    gradient, wanted[1][name], terms=1, dtype=dtype, what=f"{dtype}, gradient of {name}"
                )


@law(*EVERY, cause="a tensor that is made in another dtype, or .float() on float64")
def result_keeps_the_precision_of_its_inputs(setting: Setting) -> None:
    """The result and the gradient have the dtype of the inputs, float32 or float64."""
    for dtype in (torch.float32, torch.float64):
        loss, gradients = value_and_gradients(setting, draw(setting, dtype=dtype))
        found = {"result": loss.dtype, **{name: g.dtype for name, g in gradients.items()}}
        require(all(one == dtype for one in found.values()), f"for inputs of {dtype}: {found}")


@law(
    *PER_TOKEN,
    cause="a difference of large numbers, or a probability that is rounded to 1 before its logarithm",
)
def float32_is_close_to_float64(setting: Setting) -> None:
    """The float32 result is that of float64 on the same numbers, within roundings."""
    single = draw(setting, 11, dtype=torch.float32)
    double = single | {name: x.double() for name, x in float_tensors(single).items()}
    ours, wanted = value_and_gradients(setting, single), value_and_gradients(setting, double)
    # A log ratio cancels: its rounding is that of the log-probabilities, and a slope magnifies it.
    magnitude = 10 * max(1.0, float(wanted[0].abs().max()))
    assert_parity(ours[0], wanted[0], terms=7, dtype=torch.float32, magnitude=magnitude)
    for name, gradient in ours[1].items():
        largest = 10 * max(1.0, float(wanted[1][name].abs().max()))
        assert_parity(gradient, wanted[1][name], terms=7, dtype=torch.float32, magnitude=largest, what=name)


@law(*PER_TOKEN, cause="max, argmax or a division by a size that may be 0")
def batch_of_no_rows_or_no_tokens_gives_as_many_losses(setting: Setting) -> None:
    """A batch without rows or without tokens gives an empty result of that shape."""
    for shape in ((2, 0), (0, 3), (0, 0)):
        batch = draw(setting, unmasked=1.0)
        none = {n: x[: shape[0], : shape[1]] for n, x in tensors(batch).items() if INPUTS[n].shape in SHAPES}
        loss, gradients = value_and_gradients(setting, batch | none)
        require(loss.shape == shape, f"{shape}: the result has the shape {tuple(loss.shape)}")
        require(
            all(g.shape[:2] == shape for g in gradients.values()), f"{shape}: the gradient has another shape"
        )


def over_vocabulary(setting: Setting) -> list[str]:
    """The inputs with one number per vocabulary entry."""
    names = [name for name in setting.inputs if INPUTS[name].shape == VOCAB]
    if not names:
        raise NotApplicable("it has no input over the vocabulary")
    return names


def forbid(batch: Batch, names: list[str], entry: int = -1) -> Batch:
    """The batch with -inf at one entry of these inputs."""

    def one(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., entry] = -math.inf
        return x

    return batch | {name: one(batch[name]) for name in names}


@law("divergence", cause="p * log(p / q) where p and q are 0: mask with torch.where before the product")
def entry_that_is_impossible_on_both_sides_contributes_nothing(setting: Setting) -> None:
    """Logits of -inf on both sides give the result of a vocabulary without that entry."""
    names = over_vocabulary(setting)
    batch = draw(setting)
    # The last entry is the least likely of the teacher's: no top-k holds it.
    for name in names:
        batch[name][..., -1] = -20.0
    batch = redraw_top_k(setting, batch)
    without = batch | {name: batch[name][..., :-1] for name in names}
    ours = value_and_gradients(setting, forbid(batch, names))
    wanted = value_and_gradients(setting, without)
    assert_parity(ours[0], wanted[0], terms=7)
    for name, gradient in ours[1].items():
        if name in names:
            require(not gradient[..., -1].any(), f"a gradient of {name!r} reaches the impossible entry")
            gradient = gradient[..., :-1]
        assert_parity(gradient, wanted[1][name], terms=7, what=name)


def redraw_top_k(setting: Setting, batch: Batch) -> Batch:
    """The batch, its top-k those of its teacher's logits, or of six entries where it has none."""
    if "teacher_topk_ids" not in setting.inputs:
        return batch
    g = torch.Generator().manual_seed(9)
    shape = batch["teacher_topk_ids"].shape
    logits = torch.randn(*shape[:-1], 6, generator=g, dtype=torch.float64)
    top = batch.get("teacher_logits", logits)[..., :6].log_softmax(-1).topk(shape[-1], -1)
    found = {"teacher_topk_logprobs": top.values, "teacher_topk_ids": top.indices}
    return batch | {name: x for name, x in found.items() if name in batch}


@law("divergence", cause="inf - inf: mask with torch.where before the difference")
def entry_that_is_impossible_on_one_side_is_never_nan(setting: Setting) -> None:
    """A logit of -inf on one side gives a number or an infinity, and not NaN."""
    for name in over_vocabulary(setting):
        batch = draw(setting)
        loss = setting.result(forbid(batch, [name], entry=0))
        require(not loss.isnan().any(), f"-inf in {name!r}: {numbers(loss)}")
        require(not loss[~batch["mask"]].any(), f"-inf in {name!r} reaches masked tokens")


@law("divergence", cause="a log-probability of a normalisation that is left out")
def vocabulary_of_one_token_gives_zero(setting: Setting) -> None:
    """With one entry, student and teacher are equal: loss and gradient are 0."""
    over_vocabulary(setting)
    loss, gradients = value_and_gradients(setting.within(1), draw(setting, vocab=1))
    for name, x in {"loss": loss, **gradients}.items():
        assert_parity(x, torch.zeros_like(x), terms=1, magnitude=1.0, what=name)


@law("divergence", cause="a softmax in steps: use log_softmax")
def logits_of_any_size_give_finite_numbers(setting: Setting) -> None:
    """Logits times 1e-6, 1e2 and 1e4 give a finite loss and gradient in float32."""
    for scale in (1e-6, 1e2, 1e4):
        batch = draw(setting, dtype=torch.float32)
        moved = {name: batch[name] * scale for name in over_vocabulary(setting)}
        require_finite(setting, batch | moved, f"logits * {scale:g}")
