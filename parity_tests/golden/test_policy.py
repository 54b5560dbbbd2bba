"""Policy losses against oat, GMPO's and VESPO's authors as recorded: value and gradient.

Every kernel is called through its catalogue row, so that a dialect is proven with the loss.
"""

import torch

from composer_plugins.conformance import reductions
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import assert_equals, assert_reduced, batch, called


@claim("gmpo_official")
def test_gmpo_equals_its_authors(case: Case) -> None:
    """Their bounds are a float32 tensor."""
    bound = float(torch.tensor(case["cliprange"], dtype=torch.float32))
    given = case | {"advantages": case["advantage"]}
    found = called("gmpo@gmpo", given, clip_low=bound, clip_high=bound)
    assert_reduced(case, found, "seq-mean-token-mean")


@claim("vespo")
def test_vespo_equals_its_authors(case: Case) -> None:
    inputs, weights = batch(case), case["rollout_is_weights"]
    logs = None if weights is None else golden.tensor(weights).clamp(min=1e-8).log()
    token_loss = reductions.kernel("policy", "vespo@vespo")(*inputs, log_weights=logs, **case["kwargs"]).loss
    loss = dialects.verl(token_loss, inputs[3], case["loss_agg_mode"])
    assert_equals(case, loss, token_loss, inputs[0])


@claim("drgrpo_loss")
def test_grpo_and_dr_grpo_equal_oat(case: Case) -> None:
    """`grpo@oat` and `dr_grpo@oat`, with oat's reduction of each."""
    clip, length = case["cliprange"], case["constant_normalizer"]
    name, mode, constant = {
        "grpo": ("grpo@oat", "seq-mean-token-mean", {}),
        "drgrpo": ("dr_grpo@oat", "seq-mean-token-sum-norm", {"max_length": length}),
    }[case["critic_type"]]
    found = called(name, case, clip_low=clip, clip_high=clip)
    assert_reduced(case, found, mode, num_sequences=len(found.mask), **constant)
