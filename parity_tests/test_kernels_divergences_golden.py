"""Divergences against five upstream repositories as recorded: value and gradient.

Not covered, by parameter: `top_k` or `distillation_topk`, `token_clip`, `logits_are_probs`; and of
DistiLLM and TAID all but forward, reverse and symmetric KL and the Jensen-Shannon divergence.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.divergences import forward_kl, jsd, reverse_kl, sampled_token
from parity_tests import golden
from parity_tests.assertions import assert_parity
from parity_tests.golden import Case, case_id
from parity_tests.oracles import cross_entropy, largest_term, per_token

GKD = golden.load("trl_gkd_jsd")
OPSD = [
    case
    for case in golden.load("opsd_generalized_jsd")
    if not case["kwargs"].keys() & {"top_k", "token_clip", "logits_are_probs"}
]
SDPO = [case for case in golden.load("sdpo") if case["config"]["distillation_topk"] is None]
SDPO_TRL = [case for case in golden.load("trl_sdpo_sdft") if case["mode"] in {"full", "sampled"}]
REPOSITORIES = golden.load("distillm") + golden.load("taid_repo_divergences")


def finite(cases: Sequence[Case]) -> list[Case]:
    """The cases in which upstream's loss is a number; the others are a known difference."""
    return [case for case in cases if case["loss"] != "nan"]


def logits(case: Case) -> tuple[Tensor, Tensor]:
    student = golden.tensor(case["student_logits"], golden.dtype(case)).requires_grad_()
    teacher = golden.tensor(case.get("teacher_logits", case["student_logits"]), student.dtype)
    return student, teacher


def labels_mask(case: Case, key: str = "labels") -> Tensor:
    """Where the labels are not -100; everywhere if the case has none."""
    if case[key] is None:
        return torch.ones(golden.tensor(case["student_logits"]).shape[:-1], dtype=torch.bool)
    return torch.tensor(case[key]) != -100


def assert_recorded(loss: Tensor, student: Tensor, case: Case, *, gradient_key: str) -> None:
    """Value and gradient equal the recording; each number is one sum over tokens and vocabulary."""
    (gradient,) = torch.autograd.grad(loss, student)
    teacher = logits(case)[1]
    # Where the two models agree, what is recorded is the rounding of larger terms that cancel.
    magnitude = largest_term(student, teacher) if torch.equal(student, teacher) else None
    scale = {"terms": student.numel(), "dtype": student.dtype, "magnitude": magnitude}
    assert_parity(loss, golden.tensor(case["loss"]), **scale)
    if gradient_key in case:
        recorded = golden.tensor(case[gradient_key])
        assert_parity(gradient, recorded, **scale, what="gradient")
    else:
        assert not loss and not gradient.any(), "only an empty batch is recorded without gradient"


@pytest.mark.parametrize("case", GKD, ids=case_id)
def test_jsd_gradient_equals_trl_gkd(case: Case) -> None:
    student, teacher = logits(case)
    mask = labels_mask(case)
    settings = dict(case["kwargs"])
    num_items = settings.pop("num_items_in_batch", None)
    num_tokens = None if num_items is None else float(num_items)
    token_loss = jsd(student, teacher, mask, **{name: float(x) for name, x in settings.items()})
    loss = aggregate(token_loss.loss, mask, "token-mean", num_tokens=num_tokens)
    assert_recorded(loss, student, case, gradient_key="grad_student")


def opsd_loss(case: Case) -> tuple[Tensor, Tensor]:
    """OPSD's three reductions, as denominators of a token mean."""
    student, teacher = logits(case)
    mask = labels_mask(case)
    settings = dict(case["kwargs"])
    reduction = settings.pop("reduction", "batchmean")
    token_loss = jsd(student, teacher, mask, **{name: float(x) for name, x in settings.items()})
    denominator = {
        "sum": 1.0,
        "mean": float(mask.sum() * student.shape[-1]),  # of tokens times vocabulary
        "batchmean": float(mask.sum()) if case["labels"] else float(len(mask)),  # of sequences!
    }
    loss = aggregate(token_loss.loss, mask, "token-mean", num_tokens=denominator[reduction])
    return loss, student


@pytest.mark.parametrize("case", finite(OPSD), ids=case_id)
def test_jsd_gradient_equals_opsd(case: Case) -> None:
    assert_recorded(*opsd_loss(case), case, gradient_key="grad_student")


def token_logprobs(logits: Tensor, ids: list[list[int]]) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[..., None]).squeeze(-1)


def sdpo_loss(case: Case) -> tuple[Tensor, Tensor]:
    """SDPO: a divergence times detached weights, on the rows that have something to distil."""
    config = case["config"]
    student, teacher = logits(case)
    mask = torch.tensor(case["response_mask"]).bool()
    if case["self_distillation_mask"] is not None:
        mask &= torch.tensor(case["self_distillation_mask"]).bool()[:, None]
    s, t = (token_logprobs(x, case["sampled_ids"]) for x in (student, teacher))

    if config["full_logit_distillation"]:
        token_loss = jsd(student, teacher, mask, beta=float(config["alpha"])).loss
    else:
        token_loss = sampled_token(s, t, mask).loss
    if config["is_clip"] is not None:
        log_ratio = s.detach() - golden.tensor(case["old_log_probs"])
        token_loss = token_loss * log_ratio.clamp(-20, 20).exp().clamp(max=config["is_clip"])
    if case["rollout_is_weights"] is not None:
        token_loss = token_loss * golden.tensor(case["rollout_is_weights"])

    return aggregate(token_loss, mask, case["loss_agg_mode"]), student


@pytest.mark.parametrize("case", finite(SDPO), ids=case_id)
def test_divergence_with_weights_and_mask_equals_sdpo(case: Case) -> None:
    assert_recorded(*sdpo_loss(case), case, gradient_key="grad_student_logits")


UPSTREAM_IS_NAN = [
    (loss_of, case)
    for loss_of, cases in ((opsd_loss, OPSD), (sdpo_loss, SDPO))
    for case in cases
    if case not in finite(cases)
]


@pytest.mark.parametrize(("loss_of", "case"), UPSTREAM_IS_NAN)
def test_loss_is_finite_where_upstream_is_nan(
    loss_of: Callable[[Case], tuple[Tensor, Tensor]], case: Case
) -> None:
    """An entry that is -inf on both sides, or a batch without a live token."""
    loss, student = loss_of(case)
    (gradient,) = torch.autograd.grad(loss, student)
    assert math.isnan(float(case["loss"]))
    assert loss.isfinite() and gradient.isfinite().all()

    # What both forbid might as well not be in the vocabulary.
    allowed = golden.tensor(case["student_logits"]) > -torch.inf
    shape = (*student.shape[:-1], -1)
    s, t = (x.detach()[allowed].view(shape).tolist() for x in logits(case))
    smaller = {**case, "student_logits": s, "teacher_logits": t}
    want, s = loss_of(smaller)
    (want_gradient,) = torch.autograd.grad(want, s)
    assert_parity(loss, want, terms=s.numel())
    assert_parity(gradient[allowed].view(shape), want_gradient, terms=s.numel(), what="gradient")


@pytest.mark.parametrize("case", SDPO_TRL, ids=case_id)
def test_divergence_per_token_equals_trl_sdpo_and_sdft(case: Case) -> None:
    student, teacher = logits(case)
    everywhere = torch.ones(student.shape[:-1], dtype=torch.bool)
    if case["mode"] == "full":
        loss = jsd(student, teacher, everywhere, beta=float(case["alpha"])).loss
    else:
        s, t = (token_logprobs(x, case["completion_ids"]) for x in (student, teacher))
        loss = sampled_token(s, t, everywhere).loss
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    vocab = student.shape[-1]
    assert_parity(loss, golden.tensor(case["per_token_loss"]), terms=vocab)
    assert_parity(gradient, golden.tensor(case["grad_of_sum"]), terms=vocab, what="gradient")


def teacher_entropy(teacher: Tensor) -> Tensor:
    return per_token(lambda p: cross_entropy(p, p), teacher)


def symmetric_kl(student: Tensor, teacher: Tensor, mask: Tensor, weight: float) -> Tensor:
    """DistiLLM's, of a reverse KL and a cross-entropy."""
    ce = forward_kl(student, teacher, mask).loss + teacher_entropy(teacher)
    return weight * reverse_kl(student, teacher, mask).loss + (1 - weight) * ce


# What each name upstream is here. Their "forward KL" is a cross-entropy; DistiLLM's weight is the
# student's, TAID's the teacher's.
EQUIVALENTS: dict[str, Callable[[Tensor, Tensor, Tensor, float | None], Tensor]] = {
    "forward_kl": lambda s, t, m, _: forward_kl(s, t, m).loss + teacher_entropy(t),
    "ForwardKL": lambda s, t, m, _: forward_kl(s, t, m).loss + teacher_entropy(t),
    "reverse_kl": lambda s, t, m, _: reverse_kl(s, t, m).loss,
    "ReverseKL": lambda s, t, m, _: reverse_kl(s, t, m).loss,
    "symmetric_kl": symmetric_kl,
    "js_distance": lambda s, t, m, weight: jsd(s, t, m, beta=1 - weight).loss,
    "JS": lambda s, t, m, weight: jsd(s, t, m, beta=weight).loss,
}


def name_upstream(case: Case) -> str:
    return case["fn"] if "fn" in case else case["cls"]


def repository_id(case: Case) -> str:
    return f"{case['id']}-{name_upstream(case)}"


@pytest.mark.parametrize(
    "case", [c for c in REPOSITORIES if name_upstream(c) in EQUIVALENTS], ids=repository_id
)
def test_divergence_gradient_equals_distillm_and_its_port_in_taid(case: Case) -> None:
    student, teacher = logits(case)
    if "label" in case:
        mask, weight = labels_mask(case, "label"), case["lam"]
    else:
        mask, weight = torch.tensor(case["mask"]).bool(), case["kwargs"].get("teacher_weight")
    token_loss = EQUIVALENTS[name_upstream(case)](student, teacher, mask, weight)
    loss = aggregate(token_loss, mask, "token-mean")
    assert_recorded(loss, student, case, gradient_key="grad_student")
