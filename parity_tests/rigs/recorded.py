"""Recorded policy losses: the inputs for a kernel, and the comparison of value and gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case

# What frameworks call the parameters of a clipped loss.
NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("clip_eps", "pg_clip"), ("clip_low", "clip_high")),
    **dict.fromkeys(("eps_clip", "clip_eps_low", "ratio_clip_min", "ratio_clip_low"), ("clip_low",)),
    **dict.fromkeys(("pg_clip_low", "cispo_epsilon_low", "clip_range_low"), ("clip_low",)),
    **dict.fromkeys(("epsilon", "eps_low", "clip_ratio_low"), ("clip_low",)),
    **dict.fromkeys(("eps_clip_high", "eps_clip_higher", "clip_eps_high", "ratio_clip_max"), ("clip_high",)),
    **dict.fromkeys(("ratio_clip_high", "pg_clip_high", "cispo_epsilon_high"), ("clip_high",)),
    **dict.fromkeys(("clip_range_high", "epsilon_high", "eps_high", "clip_ratio_high"), ("clip_high",)),
    **dict.fromkeys(("eps_clip_c", "c_clip", "ratio_clip_c", "clip_ratio_c", "dual_clip"), ("dual_clip",)),
    **dict.fromkeys(("delta", "tis_upper_bound"), ("ratio_cap",)),
    **{"off_policy_sequence_mask_delta": ("threshold",), "kimi15_tau": ("beta",)},
    **{"tau_pos": ("tau_pos",), "tau_neg": ("tau_neg",)},
}
RECORDED = {
    "logprobs": "log_prob",
    "old_logprobs": "old_log_prob",
    "rollout_logprobs": "rollout_log_prob",
    "advantages": "advantages",
}


class Called(NamedTuple):
    """Our loss per token, what it is a function of, the mask, and what was called."""

    token: TokenLoss
    logprobs: Tensor
    mask: Tensor
    choice: Choice


def params(case: Case) -> dict[str, Any]:
    """The options of a case that are parameters, under our names."""
    return {ours: value for key, value in case["kwargs"].items() for ours in NAMES.get(key, ())}


def called(name: str, case: Case, mask: Tensor | None = None, **params: Any) -> Called:
    """Call a loss or a dialect on a case. Without recorded rollouts the old policy has sampled."""
    choice = choose("policy", name, params)
    case = {"rollout_log_prob": case.get("old_log_prob")} | case
    inputs = {need: golden.tensor(case[RECORDED[need]]) for need in choice.loss.needs if need in RECORDED}
    inputs["mask"] = golden.tensor(case["response_mask"]).bool() if mask is None else mask
    inputs["logprobs"].requires_grad_()
    return Called(call_unchecked(choice, inputs), inputs["logprobs"], inputs["mask"], choice)


def batch(case: Case, policy: str = "old_log_prob") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, those of the old (or the named) policy, advantages and mask."""
    logprobs = golden.tensor(case["log_prob"]).requires_grad_()
    mask = golden.tensor(case["response_mask"]).bool()
    return logprobs, golden.tensor(case[policy]), golden.tensor(case["advantages"]), mask


def assert_equals(case: Case, loss: Tensor, token_loss: Tensor, logprobs: Tensor) -> None:
    """Assert that the reduced loss and its gradient in the log-probabilities are the recorded ones.

    The loss is a sum over tokens that may cancel, so the magnitude is its largest term and not the sum. The
    gradient of one token is a sum over tokens too, where ratios are per sequence.
    """
    theirs, their_gradient = golden.tensor(case["loss"]), golden.tensor(case["grad_log_prob"])
    share, gradient = torch.autograd.grad(loss, [token_loss, logprobs])
    largest = float((share * token_loss.detach()).abs().max())
    assert_parity(loss, theirs, terms=token_loss.numel(), magnitude=largest, what="loss")
    assert_parity(gradient, their_gradient, terms=token_loss.shape[-1], what="gradient")


def assert_reduced(case: Case, found: Called, mode: str = "", **counts: float) -> None:
    """Assert that the loss, reduced by the mode of its row or by another, is the recorded one."""
    loss = aggregate(found.token.loss, found.mask, mode or found.choice.mode, **counts)
    assert_equals(case, loss, found.token.loss, found.logprobs)
