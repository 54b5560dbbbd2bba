"""A recorded batch of SmolLM2 with replies four steps old: our losses on real ratios, some clipped."""

import pytest
import torch

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import choose
from parity_tests.rigs import older_batch

EPS = torch.finfo(torch.float32).eps
POLICIES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "cispo@trl", "sapo", "dppo_tv", "gmpo", "vespo")


def test_the_trainer_logged_the_loss_and_the_metrics_of_the_formula() -> None:
    given, logged = older_batch.tensors(), older_batch.recorded()["logged"]
    mask, advantages = given["mask"], given["advantages"].reshape(len(given["mask"]), -1)
    ratio = (given["logprobs"] - given["old_logprobs"]).exp()
    terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    count = mask.sum()
    right = {
        "loss": (terms * mask).sum() / count,
        "ratio": (ratio * mask).sum() / count,
        "clip_frac_low": ((ratio < 0.8) & (advantages < 0) & mask).sum() / count,
        "clip_frac_high": ((ratio > 1.28) & (advantages > 0) & mask).sum() / count,
    }
    # The trainer computes and adds up in float32; each of its terms is rounded a few times.
    size = {"loss": (terms.abs() * mask).sum() / count}
    for name, value in right.items():
        tolerance = 16 * EPS * float(size.get(name, torch.tensor(1.0)))
        assert logged[f"composer/policy/{name}"] == pytest.approx(float(value), rel=0, abs=tolerance), name
    assert right["clip_frac_low"] > 0 and right["clip_frac_high"] > 0


def test_the_advantages_are_the_rewards_within_their_groups() -> None:
    rows = older_batch.recorded()["rows"]
    rewards = torch.tensor([row["rewards"] for row in rows], dtype=torch.float64)
    groups = torch.tensor([row["groups"] for row in rows])
    given = older_batch.tensors()["advantages"].reshape(len(rows), -1)[:, 0]
    for group in groups.unique():
        of = rewards[groups == group]
        right = (of - of.mean()) / (of.std() + 1e-4)
        torch.testing.assert_close(given[groups == group], right, rtol=8 * EPS, atol=8 * EPS)
    assert given.any()


@pytest.mark.parametrize("name", POLICIES)
def test_each_compared_policy_loss_has_a_gradient_on_the_batch(name: str) -> None:
    given = older_batch.tensors()
    given["rollout_logprobs"] = given["old_logprobs"]  # the same weights
    logprobs = given["logprobs"].requires_grad_()
    choice = choose("policy", name)
    token = call(choice, {**given, "logprobs": logprobs}, check=True)
    mode = choice.dialect.mode if choice.dialect and choice.dialect.mode else choice.loss.mode
    (gradient,) = torch.autograd.grad(aggregate(token.loss, given["mask"], mode, max_length=14.0), logprobs)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
    assert not gradient[~given["mask"]].any()
