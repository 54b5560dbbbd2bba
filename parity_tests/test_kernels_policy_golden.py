"""Policy losses against verl, Stable-RL and oat as recorded: value, gradient and metrics.

Not covered, by parameter: Stable-RL's `ppo` and `ppo_recompute`, a ratio mask on a score-form loss.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.kernels import policy
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.contract import TokenLoss
from parity_tests import dialects, golden
from parity_tests.assertions import assert_loss_parity, assert_parity
from parity_tests.golden import Case, case_id

STABLE_RL = [
    case for case in golden.load("dppo_stable_rl") if case["loss_mode"] not in {"ppo", "ppo_recompute"}
]
OAT = golden.load("drgrpo_loss")


def over_verl(name: str) -> Callable[..., Any]:
    """Run a test on every case of one of verl's recorded policy losses."""
    return pytest.mark.parametrize("case", golden.load(f"verl_policy_{name}"), ids=case_id)


def batch(case: Case, anchor: str = "old_log_prob") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, the policy they are compared with, advantages, mask."""
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    mask = golden.tensor(case["response_mask"]).bool()
    return logprobs, golden.tensor(case[anchor]), golden.tensor(case["advantages"]), mask


def assert_equals_verl(case: Case, ours: TokenLoss, logprobs: Tensor, *clipped: str) -> None:
    """The reduced loss, its gradient, and the fraction of tokens that verl logs as clipped."""
    mask = golden.tensor(case["response_mask"]).bool()
    token_loss = ours.loss
    if case["rollout_is_weights"] is not None:
        token_loss = token_loss * golden.tensor(case["rollout_is_weights"])
    loss = dialects.verl(token_loss, mask, case["loss_agg_mode"])
    assert_loss_parity(
        loss,
        token_loss,
        logprobs,
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad_log_prob"]),
    )
    fraction = sum(aggregate(ours.metrics[name].value, mask, "token-mean") for name in clipped)
    recorded = torch.tensor(case["metrics"]["actor/pg_clipfrac"])
    assert_parity(fraction, recorded, terms=1, dtype=torch.float32, magnitude=1.0)


@over_verl("vanilla")
def test_grpo_equals_verl_vanilla(case: Case) -> None:
    inputs, theirs = batch(case), case["kwargs"]
    ours = policy.grpo(
        *inputs,
        clip_low=theirs["clip_ratio_low"],
        clip_high=theirs["clip_ratio_high"],
        dual_clip=theirs["clip_ratio_c"],
        log_ratio_clamp=20.0,
    )
    assert_equals_verl(case, ours, inputs[0], "clip_low", "clip_high")


@over_verl("gspo")
def test_gspo_token_equals_verl_gspo(case: Case) -> None:
    inputs, theirs = batch(case), case["kwargs"]
    ours = policy.gspo_token(
        *inputs,
        clip_low=theirs["clip_ratio_low"],
        clip_high=theirs["clip_ratio_high"],
        log_ratio_cap=10.0,
    )
    assert_equals_verl(case, ours, inputs[0], "clip_low", "clip_high")


@over_verl("cispo")
def test_cispo_equals_verl(case: Case) -> None:
    inputs, theirs = batch(case), case["kwargs"]
    ours = policy.cispo(
        *inputs,
        clip_low=theirs["clip_ratio_low"],
        clip_high=theirs["clip_ratio_high"],
        log_ratio_clamp=20.0,
    )
    assert_equals_verl(case, ours, inputs[0], "clip_low", "clip_high")


@over_verl("dppo_tv")
def test_dppo_tv_equals_verl(case: Case) -> None:
    inputs, theirs = batch(case), case["kwargs"]
    ours = policy.dppo_tv(
        *inputs,
        tv_low=theirs["clip_ratio_low"],
        tv_high=theirs["clip_ratio_high"],
        ratio_cap=theirs["clip_ratio_c"],
        log_ratio_clamp=20.0,
    )
    assert_equals_verl(case, ours, inputs[0], "masked_low", "masked_high")


@over_verl("dppo_kl")
def test_dppo_kl_equals_verl(case: Case) -> None:
    inputs, theirs = batch(case), case["kwargs"]
    ours = policy.dppo_kl(
        *inputs,
        kl_low=theirs["clip_ratio_low"],
        kl_high=theirs["clip_ratio_high"],
        ratio_cap=theirs["clip_ratio_c"],
        log_ratio_clamp=20.0,
    )
    assert_equals_verl(case, ours, inputs[0], "masked_low", "masked_high")


def stable_rl(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    mode, cap = case["loss_mode"], case["clip_ratio_c"]
    low, high = case["clip_low"], case["clip_high"]
    # Official DPPO compares with the rollout policy; `_recompute` moves the region, not the ratio.
    region = golden.tensor(case["old_log_prob"]) if mode.endswith("_recompute") else None
    # Of the log ratio it clamps only the top, at 20: beyond what any cap here leaves of the ratio.
    common = {"ratio_cap": cap, "region_logprobs": region}
    if mode.startswith("dppo_binary_tv"):
        return policy.dppo_tv(*inputs, tv_low=low, tv_high=high, **common).loss
    if mode.startswith("dppo_binary_kl"):
        return policy.dppo_kl(*inputs, kl_low=low, kl_high=high, **common).loss
    assert mode == "pg_no_mask" and cap < 1e8
    return policy.cispo(*inputs, clip_high=cap - 1).loss


@pytest.mark.parametrize("case", STABLE_RL, ids=lambda c: f"{case_id(c)}-{c['loss_mode']}")
def test_dppo_equals_stable_rl(case: Case) -> None:
    inputs = batch(case, "rollout_log_prob")
    token_loss = stable_rl(case, inputs)
    assert_loss_parity(
        dialects.stable_rl(token_loss, inputs[3], case["loss_agg_mode"]),
        token_loss,
        inputs[0],
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad_log_prob"]),
    )


def test_stable_rl_does_not_divide_its_norm_by_sequences_and_verl_does() -> None:
    cases = [c for c in STABLE_RL if c["loss_agg_mode"] == "seq-mean-token-sum-norm"]
    for case in cases:
        inputs = batch(case, "rollout_log_prob")
        loss = dialects.verl(stable_rl(case, inputs), inputs[3], case["loss_agg_mode"])
        rows = int(inputs[3].any(-1).sum())
        assert float(loss.detach()) * rows == pytest.approx(case["loss"], rel=1e-9) != 0
        assert rows > 1


@pytest.mark.parametrize("case", OAT, ids=lambda c: f"{case_id(c)}-{c['critic_type']}")
def test_grpo_and_dr_grpo_equal_oat(case: Case) -> None:
    inputs, clip = batch(case), case["cliprange"]
    rows = len(inputs[0])
    if case["critic_type"] == "grpo":
        token_loss = policy.grpo(*inputs, clip_low=clip, clip_high=clip).loss
        loss = aggregate(token_loss, inputs[3], "seq-mean-token-mean", num_sequences=rows)
    else:
        token_loss = policy.dr_grpo(*inputs, clip_low=clip, clip_high=clip).loss
        length = case["constant_normalizer"]
        mode = "seq-mean-token-sum-norm"
        loss = aggregate(token_loss, inputs[3], mode, num_sequences=rows, max_length=length)
    assert_loss_parity(
        loss,
        token_loss,
        inputs[0],
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad_log_prob"]),
    )
