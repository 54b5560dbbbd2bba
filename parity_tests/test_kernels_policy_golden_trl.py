"""Policy losses against TRL's `GRPOTrainer._compute_loss` as recorded: value and gradient.

TRL's switches are compositions here: a kernel per `loss_type`, then factors and terms on its loss
per token. Not covered, by parameter: `loss_type` sapo and vespo.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.kernels import kl, policy
from composer_plugins.kernels.masking import masked_mean, safe_exp
from composer_plugins.kernels.ratios import log_ratio, sequence_log_ratio
from parity_tests import dialects, golden
from parity_tests.assertions import assert_loss_parity
from parity_tests.golden import Case, case_id

NO_KERNEL_YET = {"sapo", "vespo"}
CASES = [c for c in golden.load("trl_grpo_loss") if c["kwargs"]["loss_type"] not in NO_KERNEL_YET]

DEFAULTS: dict[str, Any] = {
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_vllm": False,
    "use_bias_correction_kl": False,
    "_entropy_bonus_enabled": False,
    "entropy_coef": 0.0,
}


def options(case: Case) -> dict[str, Any]:
    unknown = set(case["kwargs"]) - set(DEFAULTS) - {"loss_type", "max_completion_length"}
    assert not unknown, f"the comparison would ignore {unknown}"
    return DEFAULTS | case["kwargs"]


def surrogate(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    """The loss per token of a `loss_type` and an importance sampling level."""
    given = options(case)
    if given["loss_type"] == "cispo":
        assert given["importance_sampling_level"] == "token"
        return policy.cispo(*inputs, clip_high=given["epsilon_high"] - 1).loss
    clips = {"clip_low": given["epsilon_low"], "clip_high": given["epsilon_high"]}
    if given["importance_sampling_level"] == "sequence":
        assert given["delta"] is None
        return policy.gspo(*inputs, **clips).loss
    return policy.grpo(*inputs, **clips, ratio_cap=given["delta"]).loss


def high_entropy(case: Case, mask: Tensor) -> Tensor:
    """TRL's `top_entropy_quantile`: its threshold is a float32."""
    entropies = golden.tensor(case["entropies"])
    quantile = options(case)["top_entropy_quantile"]
    if quantile == 1:
        return mask
    return mask & (entropies >= torch.quantile(entropies[mask].float(), 1 - quantile))


def token_loss(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    logprobs, old, advantages, mask = inputs
    given, loss = options(case), surrogate(case, inputs)
    if given["off_policy_mask_threshold"] is not None:
        drift = golden.tensor(case["sampling_per_token_logps"]) - logprobs.detach()
        near = masked_mean(drift, mask, keepdim=True) <= given["off_policy_mask_threshold"]
        loss = loss * ((advantages >= 0) | near)
    loss = loss * high_entropy(case, mask)
    if given["use_vllm"]:
        loss = loss * golden.tensor(case["importance_sampling_ratio"])
    if given["beta"]:
        penalty = kl.k3(logprobs, golden.tensor(case["ref_per_token_logps"]), mask)
        if given["use_bias_correction_kl"]:
            log_r = log_ratio(logprobs, old, mask)
            if given["importance_sampling_level"] == "sequence":
                log_r = sequence_log_ratio(log_r, mask)
            penalty = penalty * safe_exp(log_r)
        loss = loss + given["beta"] * penalty
    return loss


def trl_batch(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old log-probabilities, advantages [B, 1], mask."""
    logprobs = golden.tensor(case["per_token_logps"]).requires_grad_()
    advantages = golden.tensor(case["advantages"]).unsqueeze(-1)
    mask = golden.tensor(case["completion_mask"]).bool()
    old = case["old_per_token_logps"]  # None on-policy, where TRL takes logprobs.detach()
    return logprobs, logprobs if old is None else golden.tensor(old), advantages, mask


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{case_id(c)}-{c['kwargs']['loss_type']}")
def test_policy_losses_equal_trl(case: Case) -> None:
    inputs = trl_batch(case)
    logprobs, _, _, mask = inputs
    per_token = token_loss(case, inputs)
    loss, given = dialects.trl(per_token, mask, case), options(case)
    if given["_entropy_bonus_enabled"]:
        acts_on = high_entropy(case, mask)
        entropy = golden.tensor(case["entropies"])[acts_on].sum() / acts_on.sum().clamp(min=1)
        loss = loss - given["entropy_coef"] * entropy
    assert_loss_parity(
        loss,
        per_token,
        logprobs,
        theirs=golden.tensor(case["loss"]),
        their_gradient=golden.tensor(case["grad"]),
    )


def test_trl_cispo_epsilon_is_the_cap_and_not_its_distance_from_one() -> None:
    by_default = [c for c in CASES if c["kwargs"].keys() == {"loss_type", "max_completion_length"}]
    cases = [c for c in by_default if c["kwargs"]["loss_type"] == "cispo"]
    assert cases
    for case in cases:
        inputs = trl_batch(case)
        by_name = dialects.trl(policy.cispo(*inputs, clip_high=0.2).loss, inputs[3], case)
        assert float(by_name.detach()) != pytest.approx(case["loss"], rel=0.1)
