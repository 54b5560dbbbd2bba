"""Divergences against eight upstream repositories as recorded: value and gradient, through catalogue rows."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.divergences import summands
from composer_plugins.testing.assertions import assert_parity, largest_term
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim, is_nan, is_number

LEAST_PROBABILITY = 1e-8  # what OPSD takes the logarithm of where it is given probabilities
kernel = partial(reductions.kernel, "divergence")


def logits(case: Case) -> tuple[Tensor, Tensor]:
    student = golden.tensor(case["student_logits"], golden.dtype(case)).requires_grad_()
    teacher = golden.tensor(case.get("teacher_logits", case["student_logits"]), student.dtype)
    return student, teacher


def labels_mask(case: Case, key: str = "labels") -> Tensor:
    """Where the labels are not -100; everywhere if the case has none."""
    if case[key] is None:
        return torch.ones(golden.tensor(case["student_logits"]).shape[:-1], dtype=torch.bool)
    return torch.tensor(case[key]) != -100


def assert_recorded(
    loss: Tensor,
    student: Tensor,
    case: Case,
    *,
    gradient_key: str = "grad_student",
    gradient_dtype: torch.dtype | None = None,
) -> None:
    """Value and gradient equal the recording; each number is one sum over tokens and vocabulary."""
    __tracebackhide__ = True
    (gradient,) = torch.autograd.grad(loss, student)
    scale = {"terms": student.numel(), "magnitude": largest_term(student, logits(case)[1])}
    assert_parity(loss, golden.tensor(case["loss"]), **scale, dtype=student.dtype)
    if gradient_key in case:
        recorded = golden.tensor(case[gradient_key])
        dtype = gradient_dtype or student.dtype
        assert_parity(gradient, recorded, **scale, dtype=dtype, what="gradient")
    else:
        assert not loss and not gradient.any(), "only an empty batch is recorded without gradient"


def assert_finite_where_upstream_is_not(loss_of: Callable[[Case], tuple[Tensor, Tensor]], case: Case) -> None:
    """An entry is -inf on both sides, or no token is unmasked: losses/test_laws.py compares the numbers."""
    loss, student = loss_of(case)
    (gradient,) = torch.autograd.grad(loss, student)
    assert math.isnan(float(case["loss"]))
    assert loss.isfinite() and gradient.isfinite().all()


def opsd_loss(case: Case) -> tuple[Tensor, Tensor]:
    """`jsd@opsd`, and at beta = 0 `forward_kl@opsd`; OPSD's three reductions are denominators of a mean."""
    student, teacher = logits(case)
    mask = labels_mask(case)
    given = case["kwargs"]
    settings = {"temperature": float(given.get("temperature", 1.0)), "top_k": given.get("top_k")}
    settings["entry_clip"] = given.get("token_clip")
    if given.get("logits_are_probs"):
        s, t = (x.clamp(min=LEAST_PROBABILITY).log() for x in (student, teacher))
        entries = summands.jsd(s, t, float(given["beta"]))
        token_loss = torch.where(mask, summands.total(entries, settings["entry_clip"]), 0.0)
    elif given["beta"] == 0:
        token_loss = kernel("forward_kl@opsd")(student, teacher, mask, **settings).loss
    else:
        settings["beta"] = float(given["beta"])
        token_loss = kernel("jsd@opsd")(student, teacher, mask, **settings).loss
    vocab = settings["top_k"] or student.shape[-1]
    denominator = {
        "sum": 1.0,
        "mean": float(mask.sum() * vocab),  # of tokens times vocabulary
        "batchmean": float(mask.sum()) if case["labels"] else float(mask.shape[0]),  # of sequences!
    }[given.get("reduction", "batchmean")]
    return aggregate(token_loss, mask, "token-mean", num_tokens=denominator), student


@claim("opsd_generalized_jsd", where=is_number)
def test_divergences_equal_opsd(case: Case) -> None:
    assert_recorded(*opsd_loss(case), case)


@claim("opsd_generalized_jsd", where=is_nan)
def test_loss_is_finite_where_opsd_is_nan(case: Case) -> None:
    assert_finite_where_upstream_is_not(opsd_loss, case)


def token_logprobs(logits: Tensor, ids: list[list[int]]) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[..., None]).squeeze(-1)


def sdpo_loss(case: Case) -> tuple[Tensor, Tensor]:
    """`sdpo@sdpo` or `sampled_token@sdpo`, on the rows that have something to distil."""
    config = case["config"]
    student, teacher = logits(case)
    mask = torch.tensor(case["response_mask"]).bool()
    if case["self_distillation_mask"] is not None:
        mask &= torch.tensor(case["self_distillation_mask"]).bool()[:, None]
    s, t = (token_logprobs(x, case["sampled_ids"]) for x in (student, teacher))
    settings: dict[str, Any] = {"ratio_cap": config["is_clip"]}
    if config["is_clip"] is not None:
        settings["old_logprobs"] = golden.tensor(case["old_log_probs"])

    if config["full_logit_distillation"]:
        settings |= {"alpha": float(config["alpha"]), "top_k": config["distillation_topk"]}
        settings["rest"] = "tail" if config["distillation_add_tail"] else "renormalised"
        token_loss = kernel("sdpo@sdpo")(student, teacher, mask, student_logprobs=s, **settings).loss
    else:
        token_loss = kernel("sampled_token@sdpo")(s, t, mask, **settings).loss
    if case["rollout_is_weights"] is not None:
        token_loss = token_loss * golden.tensor(case["rollout_is_weights"])
    return dialects.verl(token_loss, mask, case["loss_agg_mode"]), student


@claim("sdpo")
def test_sdpo_equals_its_authors(case: Case) -> None:
    if is_nan(case):  # a mean over sequences of which none is unmasked
        assert_finite_where_upstream_is_not(sdpo_loss, case)
    else:
        assert_recorded(*sdpo_loss(case), case, gradient_key="grad_student_logits")


# What each function of DistiLLM and each class of TAID's repository is here, and what their weight is.
DISTILLM: dict[str, tuple[str, Callable[[float], dict[str, float]]]] = {
    "forward_kl": ("forward_kl@distillm", lambda _: {}),
    "reverse_kl": ("reverse_kl@distillm", lambda _: {}),
    "symmetric_kl": ("symmetric_kl@distillm", lambda lam: {"reverse_weight": lam}),
    "js_distance": ("jsd@distillm", lambda lam: {"beta": 1 - lam}),
    "tv_distance": ("tv@distillm", lambda _: {}),
    "skewed_forward_kl": ("skewed_forward_kl@distillm", lambda lam: {"skew": lam}),
    "skewed_reverse_kl": ("skewed_reverse_kl@distillm", lambda lam: {"skew": lam}),
}
# By default: without an option, the row alone reproduces the recording.
DISTILLM_LAM = {"js_distance": 0.9, "skewed_forward_kl": 0.1, "skewed_reverse_kl": 0.1}
TAIDS_REPOSITORY: dict[str, tuple[str, dict[str, str]]] = {
    "ForwardKL": ("forward_kl@taid", {}),
    "ReverseKL": ("reverse_kl@taid", {}),
    "JS": ("jsd@taid", {"teacher_weight": "beta"}),
    "TVD": ("tv@taid", {}),
    "SkewForwardKL": ("skewed_forward_kl@taid", {"target_weight": "skew"}),
    "SkewReverseKL": ("skewed_reverse_kl@taid", {"target_weight": "skew"}),
    "AdaptiveKL": ("adaptive_kl@taid", {"head_threshold": "head_mass"}),
}


@claim("distillm")
def test_divergences_equal_distillm(case: Case) -> None:
    name, settings = DISTILLM[case["fn"]]
    student, teacher = logits(case)
    mask = labels_mask(case, "label")
    given = {} if case["lam"] == DISTILLM_LAM.get(case["fn"]) else settings(case["lam"])
    token_loss = kernel(name)(student, teacher, mask, **given).loss
    assert_recorded(aggregate(token_loss, mask, "token-mean"), student, case)


@claim("taid_repo_divergences")
def test_divergences_equal_taids_repository(case: Case) -> None:
    name, names = TAIDS_REPOSITORY[case["cls"]]
    student, teacher = logits(case)
    mask = torch.tensor(case["mask"]).bool()
    settings = {names[theirs]: x for theirs, x in case["kwargs"].items()}
    token_loss = kernel(name)(student, teacher, mask, **settings).loss
    # The gradient through AKL's weights passes a cast to float32 there.
    rounded = torch.float32 if case["cls"] == "AdaptiveKL" else None
    loss = aggregate(token_loss, mask, "token-mean")
    assert_recorded(loss, student, case, gradient_dtype=rounded)


@claim("tinker_sdft_reverse_kl")
def test_reverse_kl_topk_equals_tinker(case: Case) -> None:
    """`reverse_kl_topk@tinker`, whose server gives the student's k log-probabilities: the vocabulary here.

    A weight of 0 marks an entry that neither side counts, and on all k entries a masked position.
    """
    student = golden.tensor(case["student_logprobs_topk"]).requires_grad_()
    weights = golden.tensor(case["teacher_weights"])
    counted, mask = weights > 0, (weights > 0).any(-1)
    logits, teacher = student.masked_fill(~counted, -torch.inf), weights.log()
    ids = torch.arange(student.shape[-1]).expand(student.shape)
    loss = kernel("reverse_kl_topk@tinker")(logits, teacher, ids, mask).loss.sum()
    (gradient,) = torch.autograd.grad(loss, student)
    scale = {"terms": student.numel(), "magnitude": largest_term(student, teacher)}
    assert_parity(loss, golden.tensor(case["loss"]), **scale)
    assert_parity(gradient, golden.tensor(case["grad"]), **scale, what="gradient")


@claim("liger_jsd")
def test_jsd_equals_liger(case: Case) -> None:
    """`jsd@liger`: from hidden states; with hard labels, half of the loss is their cross-entropy.

    Their log-softmax is in float32, so the sum of the two is compared at float32's tolerance.
    """
    leaves = [golden.tensor(case[f"student_{key}"]).requires_grad_() for key in ("input", "weight")]
    given, labels = case["kwargs"], torch.tensor(case["true_labels"])
    mask, student = labels != -100, leaves[0] @ leaves[1].T
    teacher = golden.tensor(case["teacher_input"]) @ golden.tensor(case["teacher_weight"]).T
    settings = {key: given[key] for key in ("beta", "temperature") if key in given}
    token_loss = kernel("jsd@liger")(student, teacher, mask, **settings).loss
    nll = -token_logprobs(student, labels.clamp(min=0).tolist())
    soft, hard = (given.get(f"weight_{part}_loss", 0.5) for part in ("soft", "hard"))
    loss = aggregate(soft * token_loss + hard * nll, mask, "token-mean")
    gradients = torch.autograd.grad(loss, leaves)
    factors = [float(golden.tensor(case[f"student_{key}"]).abs().max()) for key in ("weight", "input")]
    scale = {"terms": student.numel(), "magnitude": largest_term(student, teacher)}
    assert_parity(loss, golden.tensor(case["loss"]), **scale, dtype=golden.dtype(case))
    for gradient, factor, key in zip(gradients, factors, ("input", "weight"), strict=True):
        recorded = golden.tensor(case[f"grad_student_{key}"])
        scale["magnitude"] = factor * largest_term(student, teacher)
        assert_parity(gradient, recorded, **scale, dtype=golden.dtype(case), what=f"gradient of {key}")


def sampled_loss(case: Case) -> tuple[Tensor, Tensor]:
    """`sampled_token@opsd`, whose temperature divides the logits before."""
    student, teacher = logits(case)
    mask = torch.tensor(case["response_mask"]).bool()
    s, t = (token_logprobs(x / case["temperature"], case["sampled_ids"]) for x in (student, teacher))
    return aggregate(kernel("sampled_token@opsd")(s, t, mask).loss, mask, "token-mean"), student


@claim("opsd_thinking_machines", where=is_number)
def test_sampled_token_equals_opsd(case: Case) -> None:
    assert_recorded(*sampled_loss(case), case, gradient_key="grad_student_logits")


@claim("opsd_thinking_machines", where=is_nan)
def test_sampled_token_of_no_token_is_nan_in_opsd_and_zero_here(case: Case) -> None:
    loss, student = sampled_loss(case)
    (gradient,) = torch.autograd.grad(loss, student)
    assert not loss and not gradient.any() and 1 not in sum(case["response_mask"], [])
    # It takes a mean over no token, whose gradient reaches none of them.
    assert not golden.tensor(case["grad_student_logits"]).any()


def of_their_authors(row: str, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The loss per token of a dialect on recorded logits, its mask, and the student's logits."""
    student, teacher = logits(case)
    mask = labels_mask(case)
    return kernel(row)(student, teacher, mask, **case["kwargs"]).loss, mask, student


@claim("abkd", where=lambda case: case["edge"] != "limit")
def test_alpha_beta_equals_its_authors(case: Case) -> None:
    """`alpha_beta@abkd`; a sum of powers is divided by the product of two exponents."""
    token_loss, mask, student = of_their_authors("alpha_beta@abkd", case)
    assert_recorded(aggregate(token_loss, mask, "token-mean"), student, case)


@claim("abkd", where=lambda case: case["edge"] == "limit")
def test_alpha_beta_at_0_is_the_limit_and_in_abkd_a_multiple(case: Case) -> None:
    token_loss, mask, student = of_their_authors("alpha_beta@abkd", case)
    multiple = max(case["kwargs"].values())  # the exponent that is not 0
    assert multiple != 1
    assert_recorded(multiple * aggregate(token_loss, mask, "token-mean"), student, case)
    near = {name: x or 1e-4 for name, x in case["kwargs"].items()}
    student64, teacher = (x.detach().double() for x in logits(case))
    limit = kernel("alpha_beta")(student64, teacher, mask, **case["kwargs"]).loss
    assert torch.allclose(kernel("alpha_beta")(student64, teacher, mask, **near).loss, limit, rtol=0.01)


@claim("todi")
def test_todi_equals_its_authors(case: Case) -> None:
    """`todi@todi`, the sum over tokens."""
    token_loss, mask, student = of_their_authors("todi@todi", case)
    assert_recorded(aggregate(token_loss, mask, "token-sum"), student, case)


@claim("nemo_rl_distillation")
def test_symmetric_kl_topk_equals_nemo_rl(case: Case) -> None:
    """`symmetric_kl_topk@nemo-rl`, which calls it mixed."""
    student = golden.tensor(case["student_logits"], torch.float32).requires_grad_()
    top = golden.tensor(case["teacher_topk_logits"], torch.float32).log_softmax(-1)
    ids, mask = torch.tensor(case["teacher_topk_indices"]), torch.tensor(case["mask"]).bool()
    weight = 1 - case["kwargs"]["mixed_kl_weight"]
    token_loss = kernel("symmetric_kl_topk@nemo-rl")(student, top, ids, mask, reverse_weight=weight).loss
    loss = dialects.nemo_rl(token_loss, mask)
    (gradient,) = torch.autograd.grad(loss, student)
    largest = largest_term(student.gather(-1, ids), top)
    scale = {"terms": student.numel(), "magnitude": largest, "dtype": torch.float32}
    assert_parity(loss, golden.tensor(case["loss"]), **scale)
    assert_parity(gradient, golden.tensor(case["grad_student"]), **scale, what="gradient")
