"""Policy losses against TRL's `GRPOTrainer._compute_loss` as recorded: value and gradient.

TRL's switches are compositions here: a kernel per `loss_type`, through its catalogue row, then factors
and terms on its loss per token.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.frameworks.trl import LOSS_OPTIONS, TRL
from composer_plugins.kernels import kl
from composer_plugins.kernels.policy.masked import off_policy_sequence_mask, sequence_drift
from composer_plugins.losses.choosing import choose
from composer_plugins.testing.assertions import assert_loss_parity, assert_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim

DEFAULTS: dict[str, Any] = {
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_vllm": False,
    "use_bias_correction_kl": False,
    "_entropy_bonus_enabled": False,
    "entropy_coef": 0.0,
}
PARAMETERS = {key for key, option in LOSS_OPTIONS.items() if option.sets}
LOG_WEIGHT_MIN = math.log(1e-8)


def float32(x: float) -> float:
    """A number as TRL's torch.where of two Python floats has it."""
    return float(torch.tensor(x, dtype=torch.float32))


def options(case: Case) -> dict[str, Any]:
    unknown = set(case["kwargs"]) - set(DEFAULTS) - PARAMETERS - {"loss_type", "max_completion_length"}
    assert not unknown, f"the comparison would ignore {unknown}"
    return DEFAULTS | case["kwargs"]


def vespo_log_weights(case: Case, mask: Tensor) -> Tensor | None:
    """TRL multiplies the corrections of masked tokens into w too: here the unmasked tokens share them."""
    if case["importance_sampling_ratio"] is None:
        return None
    logs = golden.tensor(case["importance_sampling_ratio"]).log().clamp(LOG_WEIGHT_MIN, 20.0)
    share = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return share.expand(mask.shape)


def row_of(loss_type: str, level: str = "token") -> str:
    """The dialect that a `loss_type` and an importance sampling level choose."""
    return TRL.row_of(loss_type=loss_type, importance_sampling_level=level) or ""


def surrogate(case: Case, inputs: tuple[Tensor, ...]) -> Tensor:
    """The loss per token of a `loss_type` and an importance sampling level."""
    given = options(case)
    choice = choose("policy", row_of(given["loss_type"], given["importance_sampling_level"]))
    params = {name: choice.value(name) for name in choice.loss.parameters}
    params |= TRL.parameters(choice.loss, given | {"epsilon": given["epsilon_low"]})
    optional = {}
    if choice.loss.name in ("sapo", "vespo"):
        params = {name: float32(x) if isinstance(x, float) else x for name, x in params.items()}
    if choice.loss.name == "vespo":  # its smallest w, e^-18.4 for ours of e^-20, is beyond float64 here
        optional["log_weights"] = vespo_log_weights(case, inputs[3])
    return choice.loss.kernel()(*inputs, **params, **optional).loss


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
        drift = sequence_drift(logprobs, golden.tensor(case["sampling_per_token_logps"]), mask)
        near = off_policy_sequence_mask(drift, advantages, threshold=given["off_policy_mask_threshold"])
        loss = loss * near
    loss = loss * high_entropy(case, mask)
    if given["use_vllm"] and given["loss_type"] != "vespo":
        loss = loss * golden.tensor(case["importance_sampling_ratio"])
    if given["beta"]:
        ref, level = golden.tensor(case["ref_per_token_logps"]), given["importance_sampling_level"]
        penalty = reductions.kernel("kl", "k3@trl")(logprobs, ref, mask)
        if given["use_bias_correction_kl"]:
            k3_corrected = reductions.kernel("kl", "k3_corrected@trl")
            penalty = k3_corrected(logprobs, old, ref, mask, level=level)
        loss = loss + given["beta"] * penalty
    return loss


def trl_batch(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old log-probabilities, advantages [B, 1], mask."""
    logprobs = golden.tensor(case["per_token_logps"]).requires_grad_()
    advantages = golden.tensor(case["advantages"]).unsqueeze(-1)
    mask = golden.tensor(case["completion_mask"]).bool()
    old = case["old_per_token_logps"]  # None on-policy, where TRL takes logprobs.detach()
    return logprobs, logprobs if old is None else golden.tensor(old), advantages, mask


def assert_equals_trl(case: Case, loss: Tensor, per_token: Tensor, logprobs: Tensor) -> None:
    theirs, gradient = golden.tensor(case["loss"]), golden.tensor(case["grad"])
    assert_loss_parity(loss, per_token, logprobs, theirs=theirs, their_gradient=gradient)


@claim("trl_grpo_loss")
def test_policy_losses_equal_trl(case: Case) -> None:
    inputs = trl_batch(case)
    logprobs, _, _, mask = inputs
    per_token = token_loss(case, inputs)
    loss, given = dialects.trl(per_token, mask, case), options(case)
    if given["_entropy_bonus_enabled"]:
        acts_on = high_entropy(case, mask)
        entropy = golden.tensor(case["entropies"])[acts_on].sum() / acts_on.sum().clamp(min=1)
        loss = loss - given["entropy_coef"] * entropy
    assert_equals_trl(case, loss, per_token, logprobs)


OPSM = {"loss_type", "off_policy_mask_threshold", "max_completion_length", "epsilon_low", "epsilon_high"}


def is_opsm(case: Case) -> bool:
    given = case["kwargs"]
    masks = given.get("off_policy_mask_threshold") is not None and given["loss_type"] != "cispo"
    return masks and given.keys() <= OPSM


@claim("trl_grpo_loss", where=is_opsm)
def test_opsm_equals_trl(case: Case) -> None:
    given, inputs = options(case), trl_batch(case)
    logprobs, old, advantages, mask = inputs
    sampler = golden.tensor(case["sampling_per_token_logps"])
    bounds = {"clip_low": given["epsilon_low"], "clip_high": given["epsilon_high"]}
    opsm = reductions.kernel("policy", "opsm@trl")
    threshold = given["off_policy_mask_threshold"]
    per_token = opsm(logprobs, old, sampler, advantages, mask, threshold=threshold, **bounds).loss
    assert_equals_trl(case, dialects.trl(per_token, mask, case), per_token, logprobs)


@claim("trl_gmpo_loss")
def test_gmpo_equals_trl(case: Case) -> None:
    unknown = set(case["kwargs"]) - {"epsilon_low", "epsilon_high", "beta"}
    assert not unknown, f"the comparison would ignore {unknown}"
    given, inputs = case["kwargs"], trl_batch(case)
    logprobs, _, advantages, mask = inputs
    clips = {"clip_low": given["epsilon_low"], "clip_high": given["epsilon_high"]}
    per_token = reductions.kernel("policy", "gmpo@trl")(*inputs, **clips).loss
    if given["beta"]:
        ref = golden.tensor(case["ref_per_token_logps"])
        per_token = per_token + given["beta"] * kl.k3(logprobs, ref, mask)
    assert_equals_trl(case, reductions.trl_gmpo(per_token, mask, advantages), per_token, logprobs)


def test_trl_gmpo_counts_a_row_without_an_unmasked_token_as_the_ratio_1() -> None:
    """As recorded from TRL 1.16: the middle row adds -A to the value and nothing to the gradient."""
    slope = -0.11942188509563155
    test_gmpo_equals_trl(
        case={
            "id": "an empty row",
            "kwargs": {"epsilon_low": 0.4, "epsilon_high": 0.4, "beta": 0.0},
            "per_token_logps": [[-0.5, -2.0, -1.25], [-2.0, -0.75, -3.0], [-1.0, -1.5, -0.5]],
            "old_per_token_logps": [[-0.75, -1.0, -1.0], [-2.5, -0.5, -2.0], [-1.1, -1.4, -0.75]],
            "advantages": [1.5, -0.5, 0.75],
            "completion_mask": [[1, 1, 1], [0, 0, 0], [1, 1, 0]],
            "loss": -0.441598988620228,
            "grad": [[slope] * 3, [0.0] * 3, [-0.125, -0.125, 0.0]],
        }
    )


BY_DEFAULT = [
    c for c in golden.load("trl_grpo_loss") if c["kwargs"].keys() == {"loss_type", "max_completion_length"}
]


@pytest.mark.parametrize("name", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "vespo"])
def test_a_dialect_alone_reproduces_the_recordings_made_by_default(name: str) -> None:
    cases = [c for c in BY_DEFAULT if c["kwargs"]["loss_type"] == name]
    assert cases or golden.directory != golden.GOLDEN
    for case in cases:
        inputs = trl_batch(case)
        per_token = reductions.kernel("policy", row_of(name))(*inputs).loss
        assert_equals_trl(case, dialects.trl(per_token, inputs[3], case), per_token, inputs[0])


def test_trl_rounds_the_temperature_of_sapo_to_float32_and_we_do_not() -> None:
    cases = [c for c in BY_DEFAULT if c["kwargs"]["loss_type"] == "sapo" and min(c["advantages"]) < 0]
    assert cases or golden.directory != golden.GOLDEN
    for case in cases:
        inputs = trl_batch(case)
        exact = dialects.trl(reductions.kernel("policy", "sapo@trl")(*inputs).loss, inputs[3], case)
        assert float(exact.detach()) == pytest.approx(case["loss"], rel=1e-6)
        with pytest.raises(AssertionError, match="value"):
            assert_parity(exact, golden.tensor(case["loss"]), terms=inputs[3].numel())
