"""Preference losses and their scores against the recordings of five upstream functions.

Not covered, by parameter: IPO; of TRL's DPO family all but `sigmoid` and `sigmoid_norm` under reverse
KL; AlphaPO (`alpha` other than 0 in TRL's CPO trainer).
"""

import pytest
import torch
from torch import Tensor

from composer_plugins.kernels.contract import PairLoss
from composer_plugins.kernels.preference import dpo, sequence_logprobs, simpo
from parity_tests import golden
from parity_tests.assertions import assert_parity
from parity_tests.golden import Case, case_id

DPO = [case for case in golden.load("dpo_eric_mitchell") if not case["kwargs"].get("ipo")]
SIMPO = golden.load("simpo")
CPO = [case for case in golden.load("trl_cpo_simpo") if case["kwargs"]["alpha"] == 0]
TRL_DPO = [
    case
    for case in golden.load("trl_dpo_family")
    if case["loss_type"] in {"sigmoid", "sigmoid_norm"} and case["f_divergence_type"] == "reverse_kl"
]
SCORES = golden.load("sequence_logps")


SIDES = ("chosen", "rejected")


def scores(case: Case, name: str) -> list[Tensor]:
    """The two sides of `name`, in which {} stands for the side."""
    return [golden.tensor(case[name.format(side)]).requires_grad_() for side in SIDES]


def assert_recorded(ours: PairLoss, policy: list[Tensor], case: Case) -> None:
    """Losses, the gradients of their mean in the policy's scores."""
    assert_parity(ours.loss, golden.tensor(case["losses"]), terms=4)
    slopes = torch.autograd.grad(ours.loss.mean(), policy)
    for slope, want in zip(slopes, scores(case, "grad_{}"), strict=True):
        assert_parity(slope, want, terms=4, what="gradient")


def assert_rewards(ours: PairLoss, chosen: Tensor, rejected: Tensor) -> None:
    """The four metrics, from the two rewards; they are detached and count for every pair."""
    want = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen),
    }
    assert ours.metrics.keys() == want.keys()
    magnitude = max(float(x.detach().abs().max()) for x in (chosen, rejected))
    for name, metric in ours.metrics.items():
        assert not metric.value.requires_grad and metric.where.all()
        assert_parity(metric.value, want[name], terms=4, magnitude=magnitude, what=name)


@pytest.mark.parametrize("case", DPO, ids=case_id)
def test_dpo_equals_its_authors(case: Case) -> None:
    """Without a reference its scores are 0: but upstream's rewards subtract the reference even then."""
    settings = dict(case["kwargs"])
    settings.pop("ipo", None)
    reference_free = settings.pop("reference_free", False)
    policy, reference = scores(case, "policy_{}_logps"), scores(case, "reference_{}_logps")
    nothing = [torch.zeros_like(x) for x in reference]
    used, left_out = (nothing, reference) if reference_free else (reference, nothing)

    ours = dpo(*policy, *used, **settings)
    assert_recorded(ours, policy, case)
    rewards = zip(scores(case, "{}_rewards"), left_out, strict=True)
    assert_rewards(ours, *(reward + settings["beta"] * x for reward, x in rewards))


@pytest.mark.parametrize("case", SIMPO, ids=case_id)
def test_simpo_equals_its_authors(case: Case) -> None:
    settings = dict(case["kwargs"])
    policy = scores(case, "policy_{}_logps_avg")
    ours = simpo(*policy, link=settings.pop("loss_type"), **settings)
    assert_recorded(ours, policy, case)
    assert_rewards(ours, *scores(case, "{}_rewards"))


@pytest.mark.parametrize("case", CPO, ids=case_id)
def test_simpo_equals_trl_cpo_whose_gamma_is_beta_times_our_ratio(case: Case) -> None:
    kwargs = case["kwargs"]
    policy = scores(case, "policy_{}_logps_avg")
    settings = {name: kwargs[name] for name in ("beta", "label_smoothing")}
    ours = simpo(*policy, gamma_beta_ratio=kwargs["simpo_gamma"] / kwargs["beta"], **settings)
    assert_recorded(ours, policy, case)
    assert_rewards(ours, *scores(case, "{}_rewards"))


@pytest.mark.parametrize("case", TRL_DPO, ids=lambda case: f"{case['id']}-{case['loss_type']}")
def test_dpo_equals_trl_on_sums_and_with_sigmoid_norm_on_averages(case: Case) -> None:
    """Rows are [chosen; rejected], the mask leads the log-probabilities by one position.

    TRL's "sigmoid" ignores label_smoothing. WPO's weights (`use_weighting`) are detached, the caller's.
    """
    logprobs = golden.tensor(case["per_token_logps"]).requires_grad_()
    mask = torch.tensor(case["completion_mask"])[:, 1:].bool()
    average = case["loss_type"] == "sigmoid_norm"
    policy, reference = (
        sequence_logprobs(x, mask, average=average).chunk(2)
        for x in (logprobs, golden.tensor(case["ref_per_token_logps"]))
    )
    loss = dpo(*policy, *reference, beta=case["beta"]).loss
    if case["use_weighting"]:
        aligned = logprobs.detach() - golden.tensor(case["log_sum_sq_probs"])
        chosen, rejected = sequence_logprobs(aligned, mask, average=True).exp().chunk(2)
        loss = loss * chosen * rejected
    (slope,) = torch.autograd.grad(loss.mean(), logprobs)
    assert_parity(loss.mean(), golden.tensor(case["loss"]), terms=mask.numel())
    want = golden.tensor(case["grad_per_token_logps"])
    # TRL's model has log-probability 0 where nothing is completed, so TRL need not mask: we do.
    assert (want[~mask] != 0).all()
    assert_parity(slope, torch.where(mask, want, 0.0), terms=mask.numel(), what="gradient")


@pytest.mark.parametrize("case", SCORES, ids=lambda case: f"{case_id(case)}-{case['impl']}")
def test_sequence_logprobs_equal_upstream(case: Case) -> None:
    """The average of an empty row is 0, without gradient, where upstream has NaN."""
    logits = golden.tensor(case["logits"]).requires_grad_()
    labels = torch.tensor(case["labels"])[:, 1:]
    mask = labels != -100
    tokens = labels.clamp(min=0)[..., None]
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, tokens).squeeze(-1)
    ours = sequence_logprobs(logprobs, mask, average=case["average_log_prob"])
    (slope,) = torch.autograd.grad(ours.sum(), logits)

    want, want_slope = golden.tensor(case["logps"]), golden.tensor(case["grad_of_sum_non_nan"])
    empty = ~mask.any(-1)
    assert torch.equal(want.isnan(), empty & case["average_log_prob"])
    assert not ours[empty].any() and not slope[empty].any()
    assert_parity(ours[~empty], want[~empty], terms=logits[0].numel())
    assert_parity(slope[~empty], want_slope[~empty], terms=logits.shape[-1], what="gradient")
