"""Policy losses against verl, oat, GMPO's and VESPO's authors as recorded: value, gradient, metrics.

Every kernel is called through its catalogue row, so that a dialect is proven with the loss.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels import policy
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.ratios import log_ratio
from composer_plugins.kernels.types import TokenLoss
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.dialects import VERL_LENGTH_EPS
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import assert_equals, assert_equals_verl, assert_verl_logs, batch


def loss_of(name: str) -> Callable[..., Any]:
    return reductions.kernel("policy", name)


def clips(case: Case) -> dict[str, float]:
    theirs = case["kwargs"]
    return {"clip_low": theirs["clip_ratio_low"], "clip_high": theirs["clip_ratio_high"]}


@claim("verl_policy_vanilla")
@pytest.mark.parametrize("name", ["ppo@verl", "grpo@verl", "dapo@verl", "dr_grpo@verl"])
def test_clipped_losses_equal_verl_vanilla(name: str, case: Case) -> None:
    inputs = batch(case)
    ours = loss_of(name)(*inputs, **clips(case), dual_clip=case["kwargs"]["clip_ratio_c"])
    assert_equals_verl(case, ours, inputs[0], lower=dual_clipped(case, ours))


def dual_clipped(case: Case, ours: TokenLoss) -> Tensor:
    """Where dual clip bounds the loss."""
    ratio, advantages = ours.metrics["ratio"].value, golden.tensor(case["advantages"])
    return (ratio > case["kwargs"]["clip_ratio_c"]) & (advantages < 0)


def same_numbers(name: str, case: Case) -> bool:
    """Whether a recording was made with the very numbers of a dialect."""
    row = loss_of(name).keywords
    wanted = {**clips(case), "dual_clip": case["kwargs"]["clip_ratio_c"], "log_ratio_clamp": 20.0}
    return bool(row == wanted)


@pytest.mark.parametrize("name", ["ppo@verl", "grpo@verl", "dapo@verl", "dr_grpo@verl"])
def test_a_row_alone_reproduces_the_recordings_made_with_its_numbers(name: str) -> None:
    cases = [case for case in golden.load("verl_policy_vanilla") if same_numbers(name, case)]
    assert cases or golden.directory != golden.GOLDEN
    for case in cases:
        inputs = batch(case)
        ours = loss_of(name)(*inputs)
        assert_equals_verl(case, ours, inputs[0], lower=dual_clipped(case, ours))


@claim("verl_policy_gspo")
def test_gspo_token_equals_verl_gspo(case: Case) -> None:
    inputs = batch(case)
    ours = loss_of("gspo_token@verl")(*inputs, **clips(case))
    assert_equals_verl(case, ours, inputs[0], clamp=None)


@claim("verl_policy_cispo")
def test_cispo_equals_verl(case: Case) -> None:
    inputs = batch(case)
    ours = loss_of("cispo@verl")(*inputs, **clips(case))
    assert_equals_verl(case, ours, inputs[0])


@claim("verl_policy_sapo")
def test_sapo_equals_verl(case: Case) -> None:
    inputs = batch(case)
    ours = loss_of("sapo@verl")(*inputs, **case["kwargs"])
    # Whatever loss_agg_mode says: upstream takes this one.
    assert_equals_verl(case | {"loss_agg_mode": "seq-mean-token-mean"}, ours, inputs[0])


@claim("verl_policy_gpg")
@pytest.mark.parametrize("name", ["gpg@verl", "reinforce", "rloo"])
def test_gpg_equals_verl(name: str, case: Case) -> None:
    logprobs, _, advantages, mask = batch(case)
    assert_equals_verl(case, loss_of(name)(logprobs, advantages, mask), logprobs)


@claim("verl_policy_dro")
def test_dro_equals_verl(case: Case) -> None:
    inputs = batch(case)
    ours = policy.dro(*inputs, beta=case["kwargs"]["policy_loss"]["dro_beta"])
    assert_equals_verl(case, ours, inputs[0], clamp=None)


def test_dro_logs_its_drift_without_the_clamp_of_verls_other_losses() -> None:
    """As recorded from verl 0.9.1: two tokens are 25 nats from the old policy, one on either side."""
    test_dro_equals_verl(
        case={
            "id": "far away",
            "kwargs": {"policy_loss": {"dro_beta": 0.05}},
            "loss_agg_mode": "token-mean",
            "old_log_prob": [[-0.75, -1.0, -1.0], [-27.5, -0.5, -3.0]],
            "log_prob": [[-0.5, -26.0, -1.25], [-2.0, -0.75, -3.0]],
            "advantages": [[1.5] * 3, [-0.5] * 3],
            "response_mask": [[1, 1, 1], [1, 1, 0]],
            "rollout_is_weights": None,
            "loss": 14.427187499999999,
            "grad_log_prob": [[-0.2975, -0.55, -0.3025], [0.355, 0.0975, 0.0]],
            "metrics": {"actor/ppo_kl": -0.0499999999},
        }
    )


def with_verl_lengths(case: Case, loss: Tensor, ratio: Tensor, mask: Tensor) -> Tensor:
    """GMPO's loss per token were a row n + 1e-8 long: -A s becomes -A f s^f, f = n / (n + 1e-8)."""
    n = mask.sum(-1, keepdim=True).to(torch.float64)
    f = n / (n + VERL_LENGTH_EPS)
    # s^f / s is a constant of both: the factor f that it adds to the slope is put in by hand.
    shrunk = f * ratio ** (f - 1) * (f * loss + (1 - f) * loss.detach())
    weights = case["rollout_is_weights"]
    if weights is None:
        return shrunk
    log_weights = torch.where(mask, (golden.tensor(weights) + 1e-10).log(), 0.0)
    return shrunk * (log_weights.sum(-1, keepdim=True) / (n + VERL_LENGTH_EPS)).exp()


@claim("verl_policy_geo_mean")
def test_gmpo_equals_verl_geo_mean(case: Case) -> None:
    inputs = batch(case)
    mask = inputs[3]
    ours = loss_of("gmpo@verl")(*inputs, **clips(case))
    token_loss = with_verl_lengths(case, ours.loss, ours.metrics["ratio"].value, mask)
    rows = mask.shape[0]  # empty ones too
    loss = aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=rows)
    assert_equals(case, loss, token_loss, inputs[0])
    log_r, bounds = log_ratio(inputs[0].detach(), inputs[1], mask), clips(case)
    # verl counts what its bounds would clip of either side, whether or not the advantage lets them.
    outside = (log_r < -bounds["clip_low"]) | (log_r > bounds["clip_high"])
    gains = inputs[2] > 0
    assert_verl_logs(case, outside & gains, outside & (inputs[2] < 0), clamp=None)
    # Ours counts what is clipped.
    assert torch.equal(ours.metrics["clip_frac_high"].value & mask, outside & gains & (log_r > 0))


@claim("gmpo_official")
def test_gmpo_equals_its_authors(case: Case) -> None:
    logprobs, _, _, mask = inputs = batch(case | {"advantages": case["advantage"]})
    # Upstream's bounds are a float32 tensor.
    bound = float(torch.tensor(case["cliprange"], dtype=torch.float32))
    token_loss = loss_of("gmpo@gmpo")(*inputs, clip_low=bound, clip_high=bound).loss
    loss = aggregate(token_loss, mask, "seq-mean-token-mean")
    assert_equals(case, loss, token_loss, logprobs)


@claim("vespo")
def test_vespo_equals_its_authors(case: Case) -> None:
    inputs = batch(case)
    weights = case["rollout_is_weights"]
    logs = None if weights is None else golden.tensor(weights).clamp(min=1e-8).log()
    token_loss = loss_of("vespo@vespo")(*inputs, log_weights=logs, **case["kwargs"]).loss
    loss = dialects.verl(token_loss, inputs[3], case["loss_agg_mode"])
    assert_equals(case, loss, token_loss, inputs[0])


@claim("drgrpo_loss")
def test_grpo_and_dr_grpo_equal_oat(case: Case) -> None:
    inputs, clip = batch(case), case["cliprange"]
    rows = {"num_sequences": inputs[0].shape[0]}
    if case["critic_type"] == "grpo":
        token_loss = loss_of("grpo@oat")(*inputs, clip_low=clip, clip_high=clip).loss
        loss = aggregate(token_loss, inputs[3], "seq-mean-token-mean", **rows)
    else:
        assert case["critic_type"] == "drgrpo"
        token_loss = loss_of("dr_grpo@oat")(*inputs, clip_low=clip, clip_high=clip).loss
        length = case["constant_normalizer"]
        loss = aggregate(token_loss, inputs[3], "seq-mean-token-sum-norm", max_length=length, **rows)
    assert_equals(case, loss, token_loss, inputs[0])
