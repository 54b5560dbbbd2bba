"""Where numbers run out: overflow, NaN, -inf, one token, no token, half precision."""

import math

import torch

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.inputs import INPUTS, PAIRS, ROWS, TOKENS, VOCAB
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import Batch, float_tensors, one_of_each_row, poisoned_at, tensors
from composer_plugins.testing.law import (
    EITHER,
    EVERY,
    FUNCTION,
    PER_TOKEN,
    PER_TOKEN_LOSS,
    BrokenLaw,
    NotApplicable,
    law,
    numbers,
    numbers_of,
    of_the_batch,
    require,
    require_equal,
)
from composer_plugins.testing.laws.tokens import MASK_LOGITS, require_zero_where_masked
from composer_plugins.testing.settings import (
    SHAPES,
    THE_LOSS,
    Setting,
    value_and_gradients,
    with_trained_gradients,
)

# In nats: exp overflows float32 at 88.7, and float64 at 709.8.
FARS = ((torch.float32, 30.0), (torch.float32, 90.0), (torch.float32, 1e4), (torch.float64, 800.0))
# How far apart the policies are: inside a clip, beyond some, beyond all, beyond where exp overflows.
SPREADS = (0.01, 0.4, 3.0, 1e4)
OVERFLOW = "exp of an unbounded log ratio: use kernels.masking.safe_exp, or kernels.ratios"
SINGLE = "the framework passes float32"
NAN = "nan_to_num, a clamp, or a comparison that is False for NaN: let NaN through, so that a user sees it"


def require_finite(setting: Setting, batch: Batch, what: str, *, value: bool = True) -> None:
    """Require a finite gradient, and a finite loss unless `value` is False."""
    loss, gradients = value_and_gradients(setting, batch)
    require(not value or loss.isfinite().all(), f"{what}: loss {numbers(loss)}")
    for name, gradient in gradients.items():
        require(gradient.isfinite().all(), f"{what}: gradient of {name} {numbers(gradient)}")


@law(*PER_TOKEN, FUNCTION, cause=OVERFLOW, finding="unsafe")
def policies_far_apart_give_finite_numbers(setting: Setting) -> None:
    """Log ratios of 30, 90, 800 and 10,000 nats give a finite loss and gradient."""
    for dtype, far in FARS:
        batch = setting.draw(unmasked=1.0, spread=0.0, dtype=dtype)
        names = [name for name in batch if name.endswith("logprobs") and INPUTS[name].shape == TOKENS]
        if "advantages" in batch:
            batch["advantages"] = batch["advantages"].sign() * 5
        near = torch.full_like(batch["mask"], -0.1, dtype=dtype)
        for moved in [*([name] for name in names), names[1:]]:  # one at a time, then all but the policy's
            for values in (near - far, torch.where(torch.arange(4)[:, None] < 2, near, near - far)):
                given = {name: values if name in moved else near for name in names}
                require_finite(setting, batch | given, f"{', '.join(moved)} {far:g} nats lower, {dtype}")


@law("preference", cause="exp of a margin: use logsigmoid or softplus", finding="unsafe")
def scores_far_apart_give_finite_numbers(setting: Setting) -> None:
    """Scores of -1e2, -1e4 and -1e6 give a finite loss and gradient in float32."""
    for far in (1e2, 1e4, 1e6):
        batch = setting.draw(size=4, dtype=torch.float32)
        for name in float_tensors(batch):
            if name.removeprefix("ref_") in ("chosen", "rejected", "scores"):
                moved = batch[name].clone()
                moved[:2] = -far
                require_finite(setting, batch | {name: moved}, f"{name} = {-far:g}")


@law(*PER_TOKEN_LOSS, FUNCTION, cause="a product of large numbers in float32", finding="unsafe")
def advantages_of_any_size_give_finite_numbers(setting: Setting) -> None:
    """Advantages times 1e-30, 1e6 and 1e20 give a finite gradient in float32, and a finite loss up to 1e18.

    The square of 1e20 is not a float32: the loss of a regression to the advantages overflows there.
    """
    if "advantages" not in setting.inputs:
        raise NotApplicable("it has no advantages")
    for scale in (1e-30, 1e6, 1e18, 1e20):
        batch = setting.draw(dtype=torch.float32)
        given, what = batch | {"advantages": batch["advantages"] * scale}, f"advantages * {scale:g}"
        require_finite(setting, given, what, value=scale < 1e20)


@law(
    *PER_TOKEN,
    FUNCTION,
    cause=NAN,
    finding="unsafe",
    excuse=of_the_batch,
    own={
        "preference": dict(
            name="nan_is_seen_in_its_pair_and_in_no_other",
            summary="NaN in a score is NaN in its pair, and in no other.",
        ),
    },
)
def nan_is_seen_in_its_row_and_in_no_other(setting: Setting) -> None:
    """NaN at an unmasked token gives a loss of NaN there, and nothing outside its row."""
    for batch in setting.batches():
        rows = torch.arange(len(batch[setting.inputs[0]]))
        for name in setting.poisonable(batch):
            for place in one_of_each_row(batch["mask"]) if "mask" in batch else rows.unsqueeze(1).tolist():
                axes = zip(("row", "token"), place, strict=False)
                what = f"NaN in {setting.named(name)} at " + ", ".join(f"{one} {i}" for one, i in axes)
                found = setting.run(batch | {name: poisoned_at(batch[name], [place])})
                loss = found[THE_LOSS] if setting.one_number else found[THE_LOSS][tuple(place)]
                require(loss.isnan(), f"{what} is hidden: the loss there is {float(loss):.6g}")
                for key, x in found.items():
                    seen = x.dim() and not x[rows != place[0]].isfinite().all()
                    require(not seen, f"{what} reaches {key} of other rows")
                require_zero_where_masked({THE_LOSS: found[THE_LOSS]}, batch, f"with {what}, {{}}")


def is_linear(setting: Setting, name: str) -> bool:
    """Whether the gradient in an input does not depend on it, as that of -A log pi."""
    batch = setting.draw(unmasked=1.0)
    gradients = [
        value_and_gradients(setting, batch | {name: batch[name] - shift})[1] for shift in (0.0, 0.37)
    ]
    return torch.equal(gradients[0][name], gradients[1][name])


@law(
    *PER_TOKEN_LOSS,
    finding="unsafe",
    cause=f"{NAN}. torch.clamp has the gradient 0 at NaN: bound a log ratio with kernels.masking.bounded, or "
    "give it the advantages' NaN with kernels.masking.with_nan_of. Or a token, or a row, that does not count",
    own={
        FUNCTION: dict(
            summary="NaN in an input that is data is NaN in the gradient of its token, where a limit on the "
            "norm sees it.",
        ),
    },
)
def nan_in_an_input_is_nan_in_the_gradient_of_its_token(setting: Setting) -> None:
    """NaN in any input is NaN in the loss and the gradient of its token, wherever the token stands.

    A token that a function clips has no gradient, with NaN in a factor of it either. NaN in its
    log-probabilities comes from logits, whose gradient is then NaN.
    """
    for name in setting.poisonable(setting.draw()):
        if name in setting.trained and (setting.one_number or is_linear(setting, name)):
            nan_logits_are_nan_in_their_gradient(setting, name)
            continue
        for seed, spread in enumerate(SPREADS):
            batch = setting.draw(seed, spread=spread, size=12, tokens=20)
            counts = batch["mask"]
            if setting.one_number:
                counts = value_and_gradients(setting, batch)[1][setting.trained[0]] != 0
            where = one_of_each_row(counts)
            found = setting.run(batch | {name: poisoned_at(batch[name], where)})
            loss = found.pop(THE_LOSS)
            for token in where:
                what = f"NaN in {setting.named(name)} at row {token[0]}, token {token[1]}, spread {spread}"
                if not setting.one_number and not loss[token].isnan():
                    is_left_out = seed == 0 and never_counts(setting, batch, token)
                    problem = f"{what}: the loss is {float(loss[token]):.6g}"
                    raise BrokenLaw(problem, finding="failed" if is_left_out else None)
                gradients = {f"{one} there": x[token] for one, x in found.items()}
                seen = name in EITHER or any(bool(x.isnan().any()) for x in gradients.values())
                require(seen, f"{what}: {numbers_of(gradients)}")


def never_counts(setting: Setting, batch: Batch, token: tuple[int, int]) -> bool:
    """Whether a token has neither loss nor gradient, with its advantage and with the negative of it."""
    signs = [batch] + [batch | {"advantages": -x} for x in [batch.get("advantages")] if x is not None]
    return not any(x[token].any() for one in signs for x in setting.run(one).values())


def nan_logits_are_nan_in_their_gradient(setting: Setting, name: str) -> None:
    """Of a loss with a constant slope in log pi: NaN logits give a NaN gradient of the logits."""
    batch = setting.draw(unmasked=1.0)
    logits = torch.randn(*batch["mask"].shape, 5, dtype=torch.float64)
    logits[0, 0, 1] = torch.nan
    logits.requires_grad_()
    loss = setting.result(batch | {name: logits.log_softmax(-1)[..., 0]})
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    require(gradient[0, 0].isnan().all(), f"NaN logits: the gradient is {numbers(gradient[0, 0])}")


@law("preference", cause=NAN, finding="unsafe")
def nan_in_a_score_is_nan_in_a_gradient(setting: Setting) -> None:
    """NaN in a score is NaN in a gradient, however far the scores are apart."""
    for spread in (0.3, 30.0, 1e6):
        batch = setting.draw(size=12, spread=spread)
        for name, x in float_tensors(batch).items():
            if name.endswith("_nll"):  # a term with a constant slope
                continue
            given = x.clone()
            given[10 if INPUTS[name].shape in (PAIRS, ROWS) else ...] = torch.nan
            _, gradients = value_and_gradients(setting, batch | {name: given})
            seen = any(bool(g.isnan().any()) for g in gradients.values())
            found = {f"the gradient of {other!r}": x for other, x in gradients.items()}
            require(seen, f"NaN in {name!r}: {numbers_of(found)}")


@law(
    *PER_TOKEN_LOSS,
    FUNCTION,
    cause="a division by the number of tokens, or a return of a constant: the loss of a masked-out batch is "
    "0 and has a gradient, or DDP waits for it",
    causes={"divergence": f"{MASK_LOGITS}. Or a division by the number of tokens, or a constant"},
)
def batch_without_an_unmasked_token_gives_zero_with_a_gradient(setting: Setting) -> None:
    """A micro-batch that is masked out gives 0, with a gradient of 0."""
    batch = setting.draw()
    require_nothing(setting, batch, batch)
    for junk in () if setting.one_number else (torch.nan, torch.inf):
        given = {name: torch.full_like(x, junk) for name, x in float_tensors(batch).items()}
        try:
            require_nothing(setting, batch | given, batch)
        except BrokenLaw as error:
            error.finding = "unsafe"
            raise


def require_nothing(setting: Setting, batch: Batch, whole: Batch) -> None:
    """Require a loss of 0 with a gradient of 0 where every token is masked out."""
    mask = torch.zeros_like(batch["mask"])
    empty = with_trained_gradients(setting, batch | {"mask": mask})
    loss = setting.result(empty, whole=whole)
    require(not loss.any(), f"the loss is {numbers(loss)}")
    total = aggregate(loss, mask, "token-mean") if loss.dim() else loss
    require(bool(total == 0), f"its mean is {float(total.detach())}")
    require(total.requires_grad, "the loss has no gradient, and DDP waits for one")
    trained = [empty[name] for name in setting.trained]
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    for name, gradient in zip(setting.trained, gradients, strict=True):
        shown = None if gradient is None else numbers(gradient)
        sound = gradient is not None and not gradient.any()
        require(sound, f"the gradient of {setting.named(name)} is {shown}")


@law(
    *EVERY,
    cause="arithmetic before an upcast: x.float() first, or kernels.masking.at_least_float32",
    finding="unsafe",
    no_function=SINGLE,
)
def half_precision_is_upcast_before_anything_else(setting: Setting) -> None:
    """In bfloat16 and float16 the result is that of float32 on the same numbers, in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        half = setting.draw(spread=0.5, dtype=dtype)
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


@law(
    *EVERY,
    cause="a tensor that is made in another dtype, or .float() on float64",
    finding="unsafe",
    no_function=SINGLE,
)
def result_keeps_the_precision_of_its_inputs(setting: Setting) -> None:
    """The result and the gradient have the dtype of the inputs, float32 or float64."""
    for dtype in (torch.float32, torch.float64):
        loss, gradients = value_and_gradients(setting, setting.draw(dtype=dtype))
        found = {"result": loss.dtype, **{name: g.dtype for name, g in gradients.items()}}
        require(all(one == dtype for one in found.values()), f"for inputs of {dtype}: {found}")


@law(
    *PER_TOKEN,
    FUNCTION,
    cause="a difference of large numbers, or a probability that is rounded to 1 before its logarithm",
)
def float32_is_close_to_float64(setting: Setting) -> None:
    """The float32 result is that of float64 on the same numbers, within roundings."""
    single = setting.draw(11, dtype=torch.float32)
    double = single | {name: x.double() for name, x in float_tensors(single).items()}
    setting.compare(setting.run(single), setting.run(double), "{}", dtype=torch.float32)


@law(
    *PER_TOKEN,
    cause="max, argmax or a division by a size that may be 0",
    finding="unsafe",
    no_function="the framework passes at least one token",
)
def batch_of_no_rows_or_no_tokens_gives_as_many_losses(setting: Setting) -> None:
    """A batch without rows or without tokens gives an empty result of that shape."""
    for shape in ((2, 0), (0, 3), (0, 0)):
        batch = setting.draw(unmasked=1.0)
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
    found = batch | {name: batch[name].clone() for name in names}
    for name in names:
        found[name][..., entry] = -math.inf
    return found


@law("divergence", cause="p * log(p / q) where p and q are 0: mask with torch.where before the product")
def entry_that_is_impossible_on_both_sides_contributes_nothing(setting: Setting) -> None:
    """Logits of -inf on both sides give the result of a vocabulary without that entry."""
    names = over_vocabulary(setting)
    batch = setting.draw()
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
        batch = setting.draw()
        loss = setting.result(forbid(batch, [name], entry=0))
        require(not loss.isnan().any(), f"-inf in {name!r}: {numbers(loss)}")
        require(not loss[~batch["mask"]].any(), f"-inf in {name!r} reaches masked tokens")


@law("divergence", cause="a log-probability of a normalisation that is left out")
def vocabulary_of_one_token_gives_zero(setting: Setting) -> None:
    """With one entry, student and teacher are equal: loss and gradient are 0."""
    over_vocabulary(setting)
    loss, gradients = value_and_gradients(setting.within(1), setting.draw(vocab=1))
    for name, x in {"loss": loss, **gradients}.items():
        assert_parity(x, torch.zeros_like(x), terms=1, magnitude=1.0, what=name)


@law("divergence", cause="a softmax in steps: use log_softmax", finding="unsafe")
def logits_of_any_size_give_finite_numbers(setting: Setting) -> None:
    """Logits times 1e-6, 1e2 and 1e4 give a finite loss and gradient in float32."""
    for scale in (1e-6, 1e2, 1e4):
        batch = setting.draw(dtype=torch.float32)
        moved = {name: batch[name] * scale for name in over_vocabulary(setting)}
        require_finite(setting, batch | moved, f"logits * {scale:g}")
