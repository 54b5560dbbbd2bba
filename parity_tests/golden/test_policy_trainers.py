"""Policy losses against OpenRLHF, slime, AReaL and NeMo-RL as recorded: value, gradient, and what they log.

Each is called through its catalogue row, and reduced by the mode of that row unless the case has another.
A case names the options that are not upstream's defaults: without any, the row alone reproduces it.
"""

import math

import torch
from torch import Tensor

from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim, is_nan, is_number
from parity_tests.rigs.recorded import assert_equals, assert_reduced, batch, called, params


def assert_logs(
    case: Case, mask: Tensor, *, dtype: torch.dtype = torch.float64, eps: float = 0.0, **logged: Tensor
) -> None:
    """Assert that means over the unmasked tokens are what upstream logs; `eps` is added to their number."""
    assert logged.keys() == case["metrics"].keys()
    n = float(mask.sum().clamp(min=1))
    for name, value in logged.items():
        mean = aggregate(value.double(), mask, "token-mean") * (n / (n + eps))
        largest = max(1.0, float(value.double().abs().max()))
        recorded = golden.tensor(case["metrics"][name])
        assert_parity(mean, recorded, terms=mask.numel(), dtype=dtype, magnitude=largest, what=name)


def clipped(token: TokenLoss) -> Tensor:
    """Where the clipped branch is the larger loss."""
    return token.metrics["clip_frac_low"].value | token.metrics["clip_frac_high"].value


def drift(case: Case) -> Tensor:
    """log old - log pi of the unmasked tokens."""
    logprobs, old, _, mask = batch(case)
    return torch.where(mask, old - logprobs.detach(), 0.0)


@claim("openrlhf_policy", where=is_number)
def test_ppo_equals_openrlhf(case: Case) -> None:
    found = called("ppo@openrlhf", case, **params(case))
    token, logprobs, mask, _ = found
    if case["kwargs"].get("token_level_loss", True):
        assert_reduced(case, found)
    else:
        loss = dialects.verl(token.loss, mask, "seq-mean-token-mean")  # n + 1e-8 here too
        assert_equals(case, loss, token.loss, logprobs)
    assert_logs(case, mask, clip_ratio=clipped(token), ppo_kl=drift(case))


@claim("openrlhf_policy", where=is_nan)
def test_a_batch_without_an_unmasked_token_is_nan_in_openrlhf_and_zero_here(case: Case) -> None:
    found = called("ppo@openrlhf", case, **params(case))
    loss = aggregate(found.token.loss, found.mask, found.choice.mode)
    (gradient,) = torch.autograd.grad(loss, found.logprobs)
    assert not loss and not gradient.any() and not found.mask.any()
    assert math.isnan(float(case["loss"])) and golden.tensor(case["grad_log_prob"]).isnan().any()
    assert all(math.isnan(float(value)) for value in case["metrics"].values())


@claim("slime_policy")
def test_ppo_equals_slime(case: Case) -> None:
    """slime counts every row, and sums clip fractions and drifts as it sums the loss: in float32."""
    found = called("ppo@slime", case, **params(case))
    token, _, mask, choice = found
    if case["calculate_per_token_loss"]:
        # Megatron divides by `normalizer`, where a row is one token at least.
        assert case["normalizer"] == float(mask.sum(-1).clamp(min=1).sum())
        mode, rows, one = "token-sum", {}, {}
    else:
        assert case["normalizer"] == 1
        # Its caller divides what is logged.
        mode, rows, one = choice.mode, {"num_sequences": len(mask)}, {"num_sequences": 1}
    assert_reduced(case, found, mode, **rows)
    for key, logged in (("pg_clipfrac", clipped(token)), ("ppo_kl", drift(case))):
        value, recorded = aggregate(logged.double(), mask, mode, **one), golden.tensor(case["metrics"][key])
        assert_parity(value, recorded, terms=mask.numel(), dtype=torch.float32, magnitude=4.0, what=key)


@claim("areal_policy")
def test_grpo_and_sapo_equal_areal(case: Case) -> None:
    """`grpo@areal`, `sapo@areal`. A case whose tensors have one dimension is packed."""
    given, options = case["kwargs"], params(case)
    if "eps_clip" in given:
        options = {"clip_high": given["eps_clip"]} | options
    found = called(
        {"ppo_actor_loss_fn": "grpo@areal", "sapo_loss_fn": "sapo@areal"}[case["fn"]], case, **options
    )
    token, mask = found.token, found.mask
    assert_reduced(case, found)
    if case["fn"] == "sapo_loss_fn":
        return
    beyond = torch.zeros_like(mask)
    if "c_clip" in given:
        beyond = (token.metrics["ratio"].value > given["c_clip"]) & (golden.tensor(case["advantages"]) < 0)
    assert_logs(case, mask, dtype=torch.float32, clip_mask=clipped(token), dual_clip_mask=beyond)


@claim("nemo_rl_policy")
def test_grpo_equals_nemo_rl(case: Case) -> None:
    """Rows that its sample_mask leaves out are masked."""
    rows = golden.tensor(case["sample_mask"]).bool().unsqueeze(-1)
    mask = golden.tensor(case["response_mask"]).bool() & rows
    token, logprobs, mask, choice = called("grpo@nemo-rl", case, mask, **params(case))
    by_token = case["kwargs"].get("token_level_loss", True)
    assert choice.mode == "token-mean"
    loss = dialects.nemo_rl(token.loss, mask, num_sequences=None if by_token else sum(case["sample_mask"]))
    assert_equals(case, loss, token.loss, logprobs)
    ratio = token.metrics["ratio"].value
    between = ratio.clamp(1 - choice.params["clip_low"], 1 + choice.params["clip_high"])
    assert_logs(case, mask, eps=dialects.NEMO_RL_EPS, probs_ratio=ratio, probs_ratio_clamped=between)
