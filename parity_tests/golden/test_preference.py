"""Preference losses and their scores against the recordings of seven upstream functions, by catalogue row."""

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.preference import cdpo, sequence_logprobs
from composer_plugins.kernels.types import PairLoss
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.dialects import NEMO_RL_EPS
from parity_tests.rigs.golden import Case, claim

SIDES = ("chosen", "rejected")


def scores(case: Case, name: str) -> list[Tensor]:
    """The two sides of `name`, in which {} stands for the side."""
    return [golden.tensor(case[name.format(side)]).requires_grad_() for side in SIDES]


def assert_recorded(ours: PairLoss, policy: list[Tensor], case: Case) -> None:
    """Losses, their mean, and its gradients in the policy's scores."""
    theirs = golden.tensor(case["losses"])
    assert_parity(ours.loss, theirs, terms=4)
    scale = {"terms": len(theirs), "magnitude": float(theirs.abs().max())}
    assert_parity(ours.loss.mean(), golden.tensor(case["loss"]), **scale, what="mean loss")
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


@claim("dpo_eric_mitchell")
def test_dpo_and_ipo_equal_eric_mitchell(case: Case) -> None:
    """Without a reference its scores are 0: but upstream's rewards subtract the reference even then.

    DPO with smoothing is `cdpo`. IPO is one of sums here, and label_smoothing is of no effect on it.
    """
    is_ipo = case["kwargs"].get("ipo", False)
    name, taken = ("ipo", {"beta"}) if is_ipo else ("dpo", {"beta", "label_smoothing"})
    settings = {key: x for key, x in case["kwargs"].items() if key in taken}
    policy, used, left_out = with_reference(case)
    ours = reductions.kernel("preference", f"{name}@eric-mitchell")(*policy, *used, **settings)
    assert_recorded(ours, policy, case)
    if settings.get("label_smoothing"):
        assert_recorded(cdpo(*policy, *used, **settings), policy, case)
    rewards = zip(scores(case, "{}_rewards"), left_out, strict=True)
    assert_rewards(ours, *(reward + settings["beta"] * x for reward, x in rewards))
    assert not choose("preference", f"{name}@eric-mitchell").average


def with_reference(case: Case) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Scores of the policy, of the reference as the loss uses it, and what its rewards subtract besides."""
    policy, reference = scores(case, "policy_{}_logps"), scores(case, "reference_{}_logps")
    nothing = [torch.zeros_like(x) for x in reference]
    if case["kwargs"].get("reference_free"):
        return policy, nothing, reference
    return policy, reference, nothing


@claim("simpo")
def test_simpo_equals_its_authors(case: Case) -> None:
    settings = dict(case["kwargs"])
    policy = scores(case, "policy_{}_logps_avg")
    simpo = reductions.kernel("preference", "simpo@official")
    ours = simpo(*policy, link=settings.pop("loss_type"), **settings)
    assert_recorded(ours, policy, case)
    assert_rewards(ours, *scores(case, "{}_rewards"))


@claim("sequence_logps")
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


@claim("simper")
def test_simper_equals_its_authors(case: Case) -> None:
    policy = scores(case, "policy_{}_logps_avg")
    ours = reductions.kernel("preference", "simper@simper")(*policy)
    assert_recorded(ours, policy, case)
    assert_rewards(ours, *scores(case, "{}_rewards"))


@claim("cal_dpo")
def test_cal_dpo_equals_its_authors(case: Case) -> None:
    """One pair a case: upstream's squares are means over the batch."""
    policy, reference = (scores(case, f"{whose}_{{}}_logps") for whose in ("policy", "reference"))
    ours = reductions.kernel("preference", "cal_dpo@cal-dpo", **case["kwargs"])(*policy, *reference)
    assert_recorded(ours, policy, case)
    assert_rewards(ours, *(x - y.detach() for x, y in zip(policy, reference, strict=True)))


@claim("nemo_rl_dpo")
def test_rpo_equals_nemo_rl(case: Case) -> None:
    """`rpo@nemo-rl`, whose rows are chosen and rejected in turn, and whose likelihood is a sum or a mean."""
    logprobs, given = golden.tensor(case["logprobs"]).requires_grad_(), case["kwargs"]
    mask = torch.tensor(case["mask"]).bool()
    sums = [sequence_logprobs(x, mask) for x in (logprobs, golden.tensor(case["ref_logprobs"]))]
    policy, reference = ((x[::2], x[1::2]) for x in sums)
    nll = -sequence_logprobs(logprobs, mask, average=given["sft_average_log_probs"])[::2]
    params = {"beta": given["reference_policy_kl_penalty"], "nll_weight": given["sft_loss_weight"]}
    pair = reductions.kernel("preference", "rpo@nemo-rl", **params)(*policy, *reference, nll)
    loss = pair.loss.sum() / (len(pair.loss) + NEMO_RL_EPS)
    (slope,) = torch.autograd.grad(loss, logprobs)
    scale = {"terms": mask.numel(), "magnitude": 10.0}
    assert_parity(loss, golden.tensor(case["loss"]), **scale)
    assert_parity(slope, golden.tensor(case["grad"]), **scale, what="gradient")


@claim("areal_preference")
def test_dpo_and_ipo_equal_areal(case: Case) -> None:
    """Scores are sums over the completion, and averages for IPO; AReaL computes the loss in float32."""
    name = {"sigmoid": "dpo@areal", "ipo": "ipo@areal"}[case["loss_type"]]
    policy = golden.tensor(case["policy_logps"]).requires_grad_()
    ref, lengths = golden.tensor(case["ref_logps"]), golden.tensor(case["lengths"])
    divisor = lengths if choose("preference", name).average else torch.ones_like(lengths)
    (chosen, rejected), (ref_chosen, ref_rejected) = (policy / divisor).unbind(1), (ref / divisor).unbind(1)
    pair = reductions.kernel("preference", name)(chosen, rejected, ref_chosen, ref_rejected, **case["kwargs"])
    (gradient,) = torch.autograd.grad(pair.loss.sum(), policy)
    largest = float((1 / (2 * case["kwargs"]["beta"])) ** 2)
    for ours, recorded, what in (
        (pair.loss, case["loss"], "value"),
        (gradient, case["grad_policy_logps"], "gradient"),
    ):
        wanted = golden.tensor(recorded)
        assert_parity(ours, wanted, terms=4, dtype=torch.float32, magnitude=largest, what=what)
