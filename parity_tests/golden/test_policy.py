"""Policy losses against oat, GMPO's and VESPO's authors as recorded: value and gradient.

Every kernel is called through its catalogue row, so that a dialect is proven with the loss.
"""

from collections.abc import Callable
from typing import Any

import torch

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import assert_equals, batch


def loss_of(name: str) -> Callable[..., Any]:
    return reductions.kernel("policy", name)


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
